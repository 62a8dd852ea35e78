"""Tiny models, written once, and the kernels' variants."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_products import SUPPORTED_VARIANTS
from pairs import TinyFiles
from specserve.engine import kernels
from tiny_models import ARCHITECTURES


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> TinyFiles:
    return TinyFiles(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(files: TinyFiles) -> Path:
    return files.path("qwen2", "target")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SUPPORTED_VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each variant that this processor supports."""
    assert kernels.use("auto", variant=request.param).variant == request.param
    yield request.param
    kernels.use("off")
