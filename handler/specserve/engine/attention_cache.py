"""The KV cache of a llama.cpp context as specserve's attention keeps it (handler/kernels/cache.h)."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from specserve.engine.kernel_library import library


class AttentionCache:
    """Scales and positions beside the 16-bit keys and values in llama.cpp's cache, which decides where a token lies."""

    def __init__(self) -> None:
        self._handle = library().specserve_new_cache()

    @property
    def cell_bytes(self) -> int:
        """Bytes that a token's keys and values take when they are saved; 0 if they cannot be, or before any pass."""
        return int(library().specserve_cell_bytes(self._handle))

    @contextmanager
    def computing(
        self, positions: NDArray[np.int32], *, saved: NDArray[np.uint8] | None, head: NDArray[np.int32] | None
    ) -> Iterator[None]:
        """Set the options of the pass that the context computes in the `with` block, over rows at these positions.

        With `saved`, what `save` returned for these rows, the pass computes nothing and copies `saved` into the cache.
        With `head`, the pass computes only these groups of the model's head (draft_head.py), and the other logits are
        -inf; a head in a format without a kernel here is always computed as a whole.
        """
        source = None if saved is None else saved.ctypes.data
        library().specserve_begin_pass(self._handle, positions.ctypes.data, positions.size, source)
        if head is not None:
            library().specserve_compute_head(head.ctypes.data, head.size)
        try:
            yield
        finally:
            library().specserve_begin_pass(None, None, 0, None)
            library().specserve_compute_head(None, 0)

    def cells(self) -> NDArray[np.int32]:
        """The cells of the last pass's rows, overwritten by the next pass; none if llama.cpp attended."""
        count = library().specserve_cell_count(self._handle)
        if count == 0:
            return np.empty(0, np.int32)
        return np.ctypeslib.as_array(library().specserve_cells(self._handle), shape=(count,))

    def save(self, cells: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy the keys and values of some cells; shape (cells, `cell_bytes`)."""
        saved = np.empty((cells.size, self.cell_bytes), np.uint8)
        library().specserve_save(self._handle, cells.ctypes.data, cells.size, saved.ctypes.data)
        return saved

    def close(self) -> None:
        """Free the memory; the context must not compute any more."""
        library().specserve_free_cache(self._handle)
