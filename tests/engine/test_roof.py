"""What the machine could do at most, as benchmarks/cost_curve.py asks the library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specserve.engine import kernels

VARIANTS = [name for name in kernels.VARIANTS if kernels.use("auto", variant=name).variant]


@pytest.fixture(autouse=True)
def _stock_afterwards() -> Iterator[None]:
    yield
    kernels.use("off")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_a_roof(variant: str) -> None:
    kernels.use("auto", variant=variant)
    roof = kernels.roof(1)
    # A shared machine makes both slower by any factor, and nothing makes a core read or multiply 1e13 bytes a second.
    assert 0 < roof.bytes_per_second < 1e13
    assert 0 < roof.products_per_second < 1e13


def test_without_kernels_of_ours_there_is_no_peak_of_theirs() -> None:
    kernels.use("off")
    with pytest.raises(kernels.Unusable):
        kernels.roof(1)
