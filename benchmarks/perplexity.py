"""What is the perplexity of each quantisation of the target, under llama.cpp's kernels, ours, and a cache of 8 bits?

Coarser weights raise perplexity, and so do wrong kernels. Two right kernels over one file differ by how they round
activations, attention and the KV cache (llama.cpp's has half precision, ours 16-bit integers): their ratio should be
within 0.2 % of 1, as far as its standard error can tell. `q8_0_cache` is the ratio with `cache_type: q8_0` to ours
without. The texts are frozen (benchmarks/texts/), so that results stay comparable.

    .venv/bin/python benchmarks/perplexity.py [--quick] [--models FILE.gguf ...] [--formats] [--variant NAME]
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from common import Row as ResultRow
from common import argument_parser, print_result, print_table
from specserve.cli.paths import DEFAULT_CONFIG
from specserve.config import CacheType, load_yaml
from specserve.engine import kernels
from specserve.engine.base import Engine, FloatArray, Row
from specserve.engine.llama import LlamaEngine
from specserve.engine.llama_model import LlamaModel, quantise
from specserve.errors import EnvironmentFailure
from specserve.machine import usable_cores
from specserve.weights.models import fetch, requantise

TEXTS = Path(__file__).parent / "texts"
FAMILIES = ("code", "prose")
# Tokens: each window is predicted from an empty context, but for its first token.
WINDOW = 512
# File types of all formats but F32: K quants by their S kinds, MXFP4 by that of mixtures; both are pure here.
FILE_TYPES = (
    *("Q4_0", "Q8_0", "Q4_K_S", "Q5_K_S", "Q6_K", "Q5_0", "IQ4_NL", "Q3_K_S", "Q4_1", "Q5_1"),
    *("IQ4_XS", "Q2_K", "MXFP4_MOE", "F16", "BF16"),
)
# Rows of a pass: their logits take 80 MB, and 160 MB in float64.
_CHUNK = 128


class Score(NamedTuple):
    """The negative log-likelihoods of tokens, natural logarithm."""

    nlls: FloatArray

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nlls.mean()))

    def ratio_to(self, other: Score) -> tuple[float, float]:
        """The ratio of this perplexity to another one of the same tokens, and the standard error of its logarithm.

        Rounding changes every token's likelihood slightly: two right kernels differ by about one standard error.
        """
        differences = self.nlls - other.nlls
        return float(np.exp(differences.mean())), float(differences.std() / np.sqrt(len(differences)))


def read_text(family: str) -> str:
    return (TEXTS / f"{family}.txt").read_text(encoding="utf-8")


def _negative_log_likelihoods(logits: FloatArray, tokens: list[int]) -> FloatArray:
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(exact).sum(axis=1))
    found: FloatArray = log_sums - exact[np.arange(len(tokens)), tokens]
    return found


def score_window(engine: Engine, tokens: list[int]) -> FloatArray:
    """The negative log-likelihoods of all tokens of a window but the first."""
    engine.truncate(0, 0)
    parts = []
    for start in range(0, len(tokens) - 1, _CHUNK):
        inputs = tokens[start : min(start + _CHUNK, len(tokens) - 1)]
        logits = engine.forward([Row(token, 0, at, wants_logits=True) for at, token in enumerate(inputs, start)])
        parts.append(_negative_log_likelihoods(logits, tokens[start + 1 : start + 1 + len(inputs)]))
    return np.concatenate(parts)


def use_all_formats(variant: str | None = None) -> kernels.Kernels:
    """Use a variant of our kernels (default: the processor's best) for every format, even where it is slower.

    Raises:
        SystemExit: this processor or build has none.
    """
    for name in [variant] if variant else kernels.VARIANTS:
        chosen = kernels.use("auto", variant=name)
        if chosen.variant:
            return chosen
    raise SystemExit(kernels.in_use().sentence)


def score(
    path: Path,
    mode: kernels.Mode,
    *,
    window: int = WINDOW,
    most: int | None = None,
    variant: str | None = None,
    cache_type: CacheType = "f16",
) -> dict[str, Score]:
    """Score the first `most` windows of every family (default: all of them, the last one shorter).

    Raises:
        SystemExit: our kernels are asked for and cannot be used.
    """
    if mode == "off":
        kernels.use("off")
    else:
        use_all_formats(variant)
    model = LlamaModel(path)
    engine = LlamaEngine(
        model,
        n_slots=1,
        context_length=window,
        threads=usable_cores().threads,
        max_rows=_CHUNK,
        max_logits=_CHUNK,
        cache_type=cache_type,
    )
    scores = {}
    for family in FAMILIES:
        tokens = model.encode(read_text(family))
        starts = list(range(0, len(tokens) - 1, window))[:most]
        parts = [score_window(engine, tokens[start : start + window]) for start in starts]
        scores[family] = Score(np.concatenate(parts))
    engine.close()
    model.close()
    return scores


def published_target() -> Path:
    """The default configuration's target as it was published."""
    _, config = load_yaml(DEFAULT_CONFIG)
    return fetch(config.target, DEFAULT_CONFIG)


def forms_of_the_target() -> list[Path]:
    """The default configuration's target as it was published, and pure Q4_0 made from it."""
    published = published_target()
    return [published, requantise(published)]


def in_all_formats(directory: Path) -> Iterator[Path]:
    """The default configuration's target in one format after the other, each removed when the next is asked for."""
    published = published_target()
    for file_type in FILE_TYPES:
        file = directory / f"{file_type}.gguf"
        if not quantise(published, file, file_type):
            raise EnvironmentFailure(f"{published}: cannot be requantised as {file_type}.")
        yield file
        file.unlink()


def compared(path: Path, family: str, stock: Score, ours: Score) -> ResultRow:
    ratio, error = ours.ratio_to(stock)
    return {
        "file": path.name,
        "family": family,
        "tokens": len(ours.nlls),
        "stock": round(stock.perplexity, 4),
        "ours": round(ours.perplexity, 4),
        "ratio": round(ratio, 4),
        "standard_error": round(error, 4),
    }


def compare(path: Path, *, most: int | None, variant: str | None) -> list[ResultRow]:
    """A row for each family, with both types of the cache."""
    stock = score(path, "off", most=most)
    ours = score(path, "auto", most=most, variant=variant)
    in_8_bits = score(path, "auto", most=most, variant=variant, cache_type="q8_0")
    rows = []
    for family in FAMILIES:
        ratio, error = in_8_bits[family].ratio_to(ours[family])
        cache = {"q8_0_cache": round(ratio, 4), "q8_0_error": round(error, 4)}
        rows.append(compared(path, family, stock[family], ours[family]) | cache)
    return rows


def compare_kernels(path: Path, *, most: int | None, variant: str | None) -> list[ResultRow]:
    """One row for all families."""
    modes: tuple[kernels.Mode, ...] = ("off", "auto")
    scores = [score(path, mode, most=most, variant=variant) for mode in modes]
    stock, ours = (Score(np.concatenate([part.nlls for part in found.values()])) for found in scores)
    return [compared(path, " and ".join(FAMILIES), stock, ours)]


def main() -> None:
    parser = argument_parser(__doc__, quick="one window a family", config=None)
    parser.add_argument("--models", nargs="+", type=Path, help="default: the target as published and as pure Q4_0")
    parser.add_argument("--formats", action="store_true", help="the default target in all formats")
    parser.add_argument("--variant", choices=kernels.VARIANTS, help="of our kernels; default: the best one")
    options = parser.parse_args()
    most = 1 if options.quick else None
    if options.formats:
        with TemporaryDirectory() as directory:
            forms = in_all_formats(Path(directory))
            rows = [row for path in forms for row in compare_kernels(path, most=most, variant=options.variant)]
    else:
        files = options.models or forms_of_the_target()
        rows = [row for path in files for row in compare(path, most=most, variant=options.variant)]
    print_table(f"perplexity in windows of {WINDOW} tokens, llama.cpp's kernels and ours", rows)
    notes = [f"windows of {WINDOW} tokens", kernels.in_use().sentence]
    sums = {family: hashlib.sha256(read_text(family).encode()).hexdigest() for family in FAMILIES}
    print_result("perplexity", {}, rows, notes, texts_sha256=sums)


if __name__ == "__main__":
    main()
