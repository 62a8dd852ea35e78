"""Inference engines: what is asked of one, llama.cpp."""
