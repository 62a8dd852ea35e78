"""What a worker takes: the weights, the pool of tokens that its start has announced, and 400 MiB for all else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from server import Server, running, worker
from specserve.cli.models import prepare
from specserve.cli.paths import CONFIG

pytestmark = pytest.mark.real

SMOLLM2 = CONFIG / "smollm2-135m.yaml"
POOL = 4096
MIB = 2**20
REST = 400 * MIB


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2 with a pool of as many tokens as one sequence may have."""
    document = yaml.safe_load(SMOLLM2.read_text())
    document["handler"] |= {"context_length": POOL, "cache_tokens": POOL, "prefix_cache_mib": 0}
    config = tmp_path_factory.mktemp("config") / "pool.yaml"
    config.write_text(yaml.safe_dump(document))
    with running(config=config) as server:
        yield server


def peak(server: Server) -> int:
    """The most bytes that the worker ever had in memory."""
    status = Path(f"/proc/{worker(server.state).pid}/status").read_text()
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(kib)


def test_a_worker_takes_its_weights_its_pool_and_little_else(smollm2: Server) -> None:
    prepared = prepare(SMOLLM2)
    assert prepared.draft is not None
    weights = prepared.target.stat().st_size + prepared.draft.stat().st_size
    (said,) = re.findall(r"the KV cache of 4096 tokens takes (\d+) MiB, the draft model's (\d+) MiB", smollm2.log())
    # 30 layers with 3 heads of 64 keys and 64 values, of 2 bytes, and scales; the draft model keeps 2,048 of each.
    assert [int(mib) for mib in said] == [round(tokens * 30 * 3 * 2 * (128 + 4) / MIB) for tokens in (POOL, 8 * 2048)]

    def ask(number: int) -> int:
        prompt = [100 + (number * n) % 40_000 for n in range(500 * (1 + number))]
        answer = smollm2.post({"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "logprobs": 5})
        return int(answer.json()["usage"]["completion_tokens"])

    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(ask, range(1, 5))) == [40] * 4
    beside = peak(smollm2) - weights - sum(map(int, said)) * MIB
    assert beside <= REST, f"{beside / MIB:.0f} MiB"
