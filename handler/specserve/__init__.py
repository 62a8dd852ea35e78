"""Speculative decoding of GGUF models on CPU, served by TorchServe."""
