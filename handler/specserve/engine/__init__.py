"""The inference engine: an interface, which llama.cpp implements."""

import os

# How often a compute thread that waits at a barrier looks before it sleeps: a core that a neighbour wants is given away
# soon. With 200 a pass of one row is a tenth slower on a quiet machine. OpenMP reads it when llama_cpp loads it; its
# default is 300,000.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
