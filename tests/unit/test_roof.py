"""benchmarks/roof.py: the limit of a machine that benchmarks/cost_curve.py compares passes with."""

from kernel_products import SUPPORTED_VARIANTS
from roof import SOURCE, measure_roof
from specserve.engine.kernels import VARIANTS


def test_every_variant_has_a_bandwidth_and_a_product_rate_that_are_those_of_a_real_machine() -> None:
    """Any core reads a megabyte and multiplies a million bytes a second, and none 1e13."""
    assert all(f'{{"{variant}", ' in SOURCE.read_text() for variant in VARIANTS)
    for variant in SUPPORTED_VARIANTS:
        assert all(1e6 < rate < 1e13 for rate in measure_roof(1, variant)), variant
