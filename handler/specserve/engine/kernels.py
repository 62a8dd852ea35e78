"""Selects specserve's kernels (handler/kernels) or llama.cpp's for matrix products and attention.

llama.cpp offers each weight to a list of buffer types, in order, and the library puts its own first. So a model loaded
after `use("auto")` has its weights packed for specserve's kernels, one loaded after `use("off")` for llama.cpp's.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from specserve.engine import kernel_trial
from specserve.engine.kernel_library import checksum, library, loaded
from specserve.errors import Unusable

Mode = Literal["auto", "off"]
# Of x86-64, then of aarch64; flags in /proc/cpuinfo have the same names.
VARIANTS = ("avx512_vnni", "avx_vnni", "avx2", "i8mm", "asimddp", "asimd")


class Left(NamedTuple):
    """What llama.cpp's kernels compute in the passes of a model, in whole or in part."""

    parts: tuple[str, ...] = ()  # "matrix products" and so on, whose results depend on the number of rows
    formats: tuple[str, ...] = ()  # of weights whose products do not, but drafts cost as much as other tokens

    @property
    def exact(self) -> bool:
        """Whether greedy and seeded outputs are the same with and without drafts, and in any company."""
        return not self.parts

    @property
    def sentence(self) -> str:
        """The same for people.

        llama.cpp has other kernels for passes of several rows and for long caches (tests/engine/test_invariance.py).
        """
        if self.exact:
            return "exact: true: a row has the same bits in any pass: greedy and seeded outputs repeat exactly"
        differ = "greedy and seeded outputs may differ between runs where two tokens are nearly equal"
        return f"exact: false: llama.cpp's kernels compute {' and '.join(self.parts)}: {differ}"


class Kernels(NamedTuple):
    """The kernels that compute for models loaded from now on."""

    variant: str | None  # the instruction set of specserve's kernels; None if llama.cpp's are used
    formats: tuple[str, ...]  # of weights, which specserve's kernels compute
    sentence: str  # the same for people, with the reason


def _stock(reason: str) -> Kernels:
    return Kernels(None, (), f"llama.cpp's own kernels compute: {reason}")


_in_use = _stock("specserve's were not selected")


def in_use() -> Kernels:
    return _in_use


def use(mode: Mode, *, variant: str | None = None) -> Kernels:
    """Select the kernels for models loaded from now on, and for all attention: specserve's only if they are right.

    The first call in a process must precede the first load of a model, when llama.cpp reads its list of buffer types.
    `variant` is one of VARIANTS, instead of the best that the processor supports; it is not tried.
    """
    global _in_use  # noqa: PLW0603 - as the library's own state
    _in_use = _choose(mode, variant)
    return _in_use


def _choose(mode: Mode, variant: str | None) -> Kernels:
    if mode == "off":
        if found := loaded():
            found.specserve_take(0)
        return _stock("`kernels: off`")
    try:
        if variant is None:
            kernel_trial.run()
        found = library()
    except Unusable as reason:
        return _stock(str(reason))
    found.specserve_take(0)
    named = found.specserve_use((variant or "").encode())
    if named is None:
        return _stock(f"this processor has not {variant}" if variant else "this processor has not even AVX2")
    formats = kernel_trial.formats()
    found.specserve_take((1 << len(formats)) - 1)
    sentence = f"specserve's own kernels compute ({named.decode()}: {', '.join(formats)}, attention)"
    return Kernels(named.decode(), formats, sentence)


def identity() -> str:
    """Return a key for cached pass costs: the library's checksum, the variant and the formats in use."""
    return f"{checksum()} {_in_use.variant} {' '.join(_in_use.formats)}" if _in_use.variant else "stock"


def calls() -> tuple[int, int]:
    """Return how many matrix products and attentions specserve's kernels have computed in this process."""
    found = loaded()
    return (found.specserve_products(), found.specserve_attentions()) if found else (0, 0)


def growth() -> int:
    """Return the bytes that loaded weights take beyond those in their files: Q5_0 is packed as Q8_0, for example."""
    found = loaded()
    return int(found.specserve_growth()) if found else 0


def left_to_llama_cpp(run: Callable[[], bool]) -> Left:
    """Return what llama.cpp computes in the passes in `run`; no others may run meanwhile.

    `run` returns whether results were the same with other numbers of rows.
    """
    found, before = loaded(), calls()
    if found:
        found.specserve_left()  # forgets earlier passes
    repeats = run()
    after, left = calls(), found.specserve_left() if found else 0
    # The bits of library.h. Outside llama.cpp's list of buffer types the library computes and notes nothing.
    kinds, asked = enumerate(("matrix products", "attention")), left or after != before
    parts = tuple(part for bit, part in kinds if not asked or left >> bit & 1)
    formats = (found.specserve_type(bit - 2).decode().upper() for bit in range(2, 64) if found and left >> bit & 1)
    if not repeats and not parts:
        parts = ("other operations",)
    return Left(parts, tuple(formats))
