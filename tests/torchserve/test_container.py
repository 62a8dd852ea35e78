"""The container: built from this repository by buildah, and run as its own user, without a compiler."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from server import PATIENCE_SECONDS, PROJECT, free_ports, openai_client, processes, tiny, until
from specserve.weights.models import prepare

pytestmark = [
    pytest.mark.long,
    pytest.mark.server,
    pytest.mark.skipif(shutil.which("buildah") is None, reason="no buildah is on PATH: apt install buildah"),
]

# Where no image registry can be reached: a Debian by debootstrap with python3.11-venv, which `podman import` has read.
BASE = os.environ.get("SPECSERVE_CONTAINER_BASE", "docker.io/library/python:3.11-slim-bookworm")
QEMU = shutil.which("qemu-x86_64-static")
BUILDAH = ["buildah", "--storage-driver", "vfs"]
STATE = "/opt/specserve/.specserve"


def buildah(*arguments: str | Path) -> str:
    outcome = subprocess.run([*BUILDAH, *arguments], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    return outcome.stdout.strip()


@pytest.fixture(scope="module")
def container() -> Iterator[str]:
    """A container of the image, which is built as `podman build` does; chroot isolation needs no cgroups."""
    image = "localhost/specserve-test"
    isolated = ["--isolation", "chroot", "--network", "host"]
    # OCI's format has no health check.
    buildah("bud", *isolated, "--format", "docker", "--layers", "--build-arg", f"BASE={BASE}", "--tag", image, PROJECT)
    name = buildah("from", "--pull-never", *isolated, image)
    yield name
    buildah("rm", name)


def in_container(name: str, *command: str | Path, volumes: tuple[str, ...] = ()) -> list[str | Path]:
    mounted = [part for volume in volumes for part in ("--volume", volume)]
    return [*BUILDAH, "run", "--isolation", "chroot", "--network", "host", *mounted, name, "--", *command]


def said(name: str, shell: str) -> str:
    command = in_container(name, "sh", "-c", shell)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_image_has_no_compiler_and_runs_as_its_own_user(container: str) -> None:
    assert said(container, "id -u; command -v g++ cc; true") == "10001"
    inspected = json.loads(buildah("inspect", container))["Docker"]["config"]
    assert inspected["User"] == "specserve"
    assert list(inspected["Volumes"]) == ["/models"]
    assert said(container, "touch /opt/specserve/new || echo refused") == "refused"


LOGITS = """
from pathlib import Path
from specserve.engine import kernels
from specserve.engine.base import Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel
variant = kernels.use("auto").variant
model = LlamaModel(Path("/tiny/model.gguf"))
engine = LlamaEngine(model, n_slots=2, context_length=64, threads=1, max_rows=16, max_logits=16)
rows = [Row(token, 0, position, wants_logits=True) for position, token in enumerate((5, 6, 7, 8))]
print(variant, engine.forward(rows).tobytes().hex())
"""


@pytest.mark.skipif(QEMU is None, reason="no qemu-x86_64-static is on PATH: apt install qemu-user-static")
def test_a_processor_with_avx2_and_no_more_computes_the_same_logits(container: str, tmp_path: Path) -> None:
    """An emulated Haswell, on which our kernels of another variant are taken."""
    (tmp_path / "logits.py").write_text(LOGITS)
    shutil.copy(prepare(tiny())["target"], tmp_path / "model.gguf")
    for path in (tmp_path, *tmp_path.iterdir()):
        path.chmod(0o755)
    volumes = (f"{tmp_path}:/tiny", f"{QEMU}:/qemu")
    outputs = []
    for emulator in ((), ("/qemu", "-cpu", "Haswell")):
        command = in_container(container, *emulator, ".venv/bin/python", "/tiny/logits.py", volumes=volumes)
        outputs.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    (_, here), (variant, there) = outputs
    assert variant == "avx2"
    assert there == here


def test_it_serves_what_its_arguments_name_and_stops_by_sigterm(container: str, tmp_path: Path) -> None:
    """SmolLM2, from a volume that has its file; the health check follows the worker."""
    state, models, port = tmp_path / "state", tmp_path / "models", free_ports()
    for directory in (state, models):
        directory.mkdir()
        directory.chmod(0o777)
    tmp_path.chmod(0o755)
    entry = json.loads(buildah("inspect", container))["Docker"]["config"]["Entrypoint"]
    serve = [*entry, "--config", "config/smollm2-135m.yaml", "--port", str(port)]
    volumes = (f"{models}:/models", f"{state}:{STATE}")
    process = subprocess.Popen(in_container(container, *serve, volumes=volumes))
    # The image's health check, for this port.
    [*_, check] = json.loads(buildah("inspect", container))["Docker"]["config"]["Healthcheck"]["Test"]
    healthy = ["python", "-c", check.replace("8080", str(port))]

    def is_healthy() -> bool:
        return subprocess.run(in_container(container, *healthy, volumes=volumes), check=False).returncode == 0

    try:
        assert not is_healthy()
        until(is_healthy, "a worker has loaded the model")
        key = json.loads((state / str(port) / "key_file.json").read_text())["inference"]["key"]
        client = openai_client(f"http://127.0.0.1:{port}/predictions/qwen/1.0/v1", key)
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=8)
        assert answer.choices[0].text
    finally:
        # buildah passes no signal on.
        [server] = [p for p in psutil.process_iter(["cmdline"]) if serve[1:] == (p.info["cmdline"] or [])[1:]]
        server.terminate()
        # 130 while it still prints its first completion.
        assert process.wait(timeout=PATIENCE_SECONDS) in {0, 130}
    assert not is_healthy()
    assert not processes(Path(STATE) / str(port))
