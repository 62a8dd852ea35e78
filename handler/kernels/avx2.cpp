#include "simd_256.h"
// (the vector operations have to come first)
#include "variant.h"

const specserve::Kernels * specserve::avx2() {
    static constexpr Kernels kernels = kernels_named("avx2");
    const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has ? &kernels : nullptr;
}
