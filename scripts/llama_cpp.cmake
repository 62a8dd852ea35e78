# Included by llama-cpp-python's build: skips the common library of llama.cpp's tools, half of the compile time.
set(LLAMA_BUILD_COMMON OFF)
