"""lm-evaluation-harness with `local-completions` reports what the API tells OpenAI's client.

The harness sends token ids of its own tokenizer, the client texts.
"""

import math
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from gguf_tokenizer import save_tokenizer
from server import PROJECT, Server, tiny
from tiny_config import MODELS

TASKS = PROJECT / "tests" / "clients" / "task"
ITEMS, CHOICES = 12, 32
CONCURRENT = {"batch_size": 2, "num_concurrent": 4}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny()
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(MODELS / "tiny-qwen2-target.gguf", directory)
    return directory


def settings_for(server: Server, tokenizer: Path, **changes: int) -> dict[str, Any]:
    reading = {"tokenizer": str(tokenizer), "tokenizer_backend": "huggingface", "max_length": 512}
    return {"base_url": f"{server.url}/v1/completions", "model": "tiny", "max_retries": 1, **reading, **changes}


@pytest.fixture(autouse=True)
def _surroundings(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)  # the tasks' paths are relative to it
    monkeypatch.setenv("OPENAI_API_KEY", server.key)


@pytest.fixture(params=[{}, CONCURRENT], ids=["one after another", "two prompts a request, four requests at once"])
def settings(request: pytest.FixtureRequest, server: Server, tokenizer: Path) -> dict[str, Any]:
    """Model arguments for serial and for concurrent requests."""
    return settings_for(server, tokenizer, **request.param)


def evaluate(task: str, settings: dict[str, Any]) -> Any:
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model="local-completions", model_args=settings, tasks=[task], task_manager=manager, bootstrap_iters=0
    )
    return results["results"][task], results["samples"][task]


def complete(server: Server, prompt: str, **fields: Any) -> Any:
    body: Any = {"model": "tiny", "prompt": prompt, "temperature": 0, **fields}
    return server.client().completions.create(**body).choices[0]


def loglikelihood(server: Server, context: str, continuation: str) -> float:
    """That of a continuation after its context; the first token of a text has none."""
    scored = complete(server, context + continuation, max_tokens=0, echo=True, logprobs=1).logprobs
    # The harness counts spaces between the two as part of the continuation.
    begin = len(context.rstrip())
    scores = zip(scored.text_offset, scored.token_logprobs, strict=True)
    return float(sum(logprob for offset, logprob in scores if logprob is not None and offset >= begin))


def test_loglikelihoods_of_choices_are_the_servers(settings: dict[str, Any], server: Server) -> None:
    metrics, samples = evaluate("specserve_choices", settings)
    assert len(samples) == ITEMS
    pairs = [pair for item in samples for pair in item["arguments"]]
    reported = [answer[0][0] for item in samples for answer in item["resps"]]
    assert len(reported) == CHOICES
    assert reported == pytest.approx([loglikelihood(server, *pair) for pair in pairs], abs=1e-3)
    assert metrics["acc,none"] == pytest.approx(sum(item["acc"] for item in samples) / ITEMS)


def test_is_greedy_is_true_of_the_greedy_continuation_only(server: Server, tokenizer: Path) -> None:
    client = get_model("local-completions")(**settings_for(server, tokenizer))
    question = "The quick brown fox"
    greedy_text = complete(server, question, max_tokens=1).text
    pairs = [(question, continuation) for continuation in (greedy_text, " \n never said")]
    calls = [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]
    assert [greedy for _, greedy in client.loglikelihood(calls)] == [True, False]


def test_rolling_loglikelihoods_are_the_servers(settings: dict[str, Any], server: Server) -> None:
    metrics, samples = evaluate("specserve_texts", settings)
    # The harness puts the BOS token before the text.
    expected = [loglikelihood(server, "", "<|endoftext|>" + item["target"]) for item in samples]
    assert len(expected) == ITEMS
    assert [item["resps"][0][0] for item in samples] == pytest.approx(expected, abs=1e-3)
    size = sum(len(item["target"].encode()) for item in samples)
    assert metrics["bits_per_byte,none"] == pytest.approx(-sum(expected) / size / math.log(2))


def test_generated_continuations_equal_decoding_without_speculation(settings: dict[str, Any], server: Server) -> None:
    _, samples = evaluate("specserve_continuations", settings)
    assert len(samples) == ITEMS
    plain: Any = {"max_tokens": 20, "stop": ["\n", "."], "extra_body": {"speculation": {"mode": "off"}}}
    for item in samples:
        assert item["resps"][0][0] == complete(server, item["doc"]["question"], **plain).text
