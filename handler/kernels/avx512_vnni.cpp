#include "simd_avx512_vnni.h"
// (the vector operations have to come first)
#include "variant.h"

const specserve::Kernels * specserve::avx512_vnni() {
    static constexpr Kernels kernels = kernels_named("avx512_vnni");
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vnni");
    return has ? &kernels : nullptr;
}
