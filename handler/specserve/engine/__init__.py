"""The inference engine: its interface, and llama.cpp behind it."""
