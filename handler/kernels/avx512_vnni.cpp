#include "simd_avx512_vnni.h"
// (the vector operations have to come first)
#include "product.h"
#include "attention.h"

const specserve::Kernels * specserve::avx512_vnni() {
    static constexpr Kernels kernels = {
        "avx512_vnni", kLanes, kMaxTile, panel_bytes, pack, quantise, multiply, store_keys, store_values,
        attention_scratch, result_floats, read_queries, attend, merge, finish};
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vnni");
    return has ? &kernels : nullptr;
}
