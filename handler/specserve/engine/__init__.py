"""The inference engine: its interface, and llama.cpp behind it."""

import os

# How often a compute thread that waits at a barrier looks before it sleeps, some 50 us: a core that a neighbour wants
# is given away soon (benchmarks/neighbours.py). OpenMP reads it when llama_cpp loads it; its default is some 8 ms.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
