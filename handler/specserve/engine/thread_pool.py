"""Binds each of llama.cpp's compute threads to a core of its own."""

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import llama_cpp

from specserve.engine import kernel_library
from specserve.engine.llama_model import start_backend

logger = logging.getLogger(__name__)

_MAX_THREADS = 512  # GGML_MAX_N_THREADS of ggml.h


class _Params(ctypes.Structure):
    """The fields that ggml_threadpool_params of ggml.h has."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * _MAX_THREADS),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


@cache
def _library(name: str) -> ctypes.CDLL:
    """Return a library that llama_cpp has loaded; it does not export what is needed here."""
    start_backend()
    return ctypes.CDLL(f"lib{name}.so.0", os.RTLD_NOLOAD | os.RTLD_NOW)


class ThreadPool:
    """The compute threads that several llama.cpp contexts share, each on a core of its own.

    One of them is the thread that runs passes; only that may use the pool. If it is the main thread, it gets all its
    cores back after each pass, since processes that it starts inherit them.
    """

    def __init__(self) -> None:
        self._contexts: list[llama_cpp.llama_context_p] = []
        self._cores: tuple[int, ...] = ()
        self._pool = ctypes.c_void_p()
        self._is_bound = False
        is_main = threading.current_thread() is threading.main_thread()
        self._given_back = os.sched_getaffinity(0) if is_main else None

    def add(self, context: llama_cpp.llama_context_p) -> None:
        self._contexts.append(context)
        self._attach(context)

    def remove(self, context: llama_cpp.llama_context_p) -> None:
        self._contexts.remove(context)

    def run_on(self, cores: tuple[int, ...], assistants: tuple[int, ...] = ()) -> None:
        """Compute with one thread on each of these cores from the next pass on.

        If it is one core, threads on those of the assistants help while they can (assistants.h).
        """
        if found := kernel_library.loaded():
            found.specserve_assist((ctypes.c_int32 * len(assistants))(*assistants), len(assistants))
        params = _Params()
        _library("ggml-base").ggml_threadpool_params_init(ctypes.byref(params), ctypes.c_int(len(cores)))
        # llama.cpp's mask ends there; on cores beyond it threads stay where the system puts them.
        if max(cores) < _MAX_THREADS:
            for core in cores:
                params.cpumask[core] = True
            params.strict_cpu = True
        new = _library("ggml-cpu").ggml_threadpool_new
        new.restype = ctypes.c_void_p
        before, self._pool = self._pool, ctypes.c_void_p(new(ctypes.byref(params)))
        self._cores, self._is_bound = cores, False
        for context in self._contexts:
            self._attach(context)
        if before:
            _library("ggml-cpu").ggml_threadpool_free(before)

    @contextmanager
    def computing(self) -> Iterator[None]:
        # Not before the first pass: threads that are started until then may run on all cores. llama.cpp binds this
        # thread only where there are others.
        if not self._is_bound and len(self._cores) == 1:
            try:
                os.sched_setaffinity(0, self._cores)
            except OSError as error:
                logger.warning("specserve: no thread can run on core %d any more (%s)", *self._cores, error.strerror)
        self._is_bound = True
        try:
            yield
        finally:
            if self._given_back:
                os.sched_setaffinity(0, self._given_back)
                self._is_bound = False

    def _attach(self, context: llama_cpp.llama_context_p) -> None:
        if self._pool:
            _library("llama").llama_attach_threadpool(ctypes.c_void_p(context), self._pool, self._pool)
            llama_cpp.llama_set_n_threads(context, len(self._cores), len(self._cores))
