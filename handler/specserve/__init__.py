"""Speculative decoding of GGUF models on CPU, served by TorchServe."""

__version__ = "0.1.0"
