"""Inference engines: what is asked of one, llama.cpp, and a fake for tests."""
