#include "simd_256.h"
// (the vector operations have to come first)
#include "variant.h"

const specserve::Kernels * specserve::avx_vnni() {
    static constexpr Kernels kernels = kernels_named("avx_vnni");
    const bool has = __builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("avx2") &&
                     __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has ? &kernels : nullptr;
}
