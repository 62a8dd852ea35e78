# Included by llama-cpp-python's build: skips the common library of llama.cpp's tools, half of the compile time.
set(LLAMA_BUILD_COMMON OFF)
# llama.cpp's AMX products come before specserve's kernels and crash where a virtual machine announces AMX without it.
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-mno-amx-int8 HAS_AMX_SWITCH)
if(HAS_AMX_SWITCH)
  add_compile_options(-mno-amx-int8)
endif()
# libllama builds graphs and ggml computes them: no pass gets slower by this, and the compiler needs a seventh less time.
cmake_language(DEFER CALL target_compile_options llama PRIVATE -O1)
cmake_language(DEFER CALL target_precompile_headers llama PRIVATE
    <algorithm> <array> <cmath> <cstring> <fstream> <functional> <map> <memory> <regex> <set> <sstream> <string> <unordered_map> <vector>)
