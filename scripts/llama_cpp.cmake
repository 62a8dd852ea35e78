# Read by llama-cpp-python's own build: what llama.cpp's tools share is half of what would be compiled, and unused here.
set(LLAMA_BUILD_COMMON OFF)
