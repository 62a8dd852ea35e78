#include "simd_256.h"
// (the vector operations have to come first)
#include "product.h"
#include "attention.h"

const specserve::Kernels * specserve::avx2() {
    static constexpr Kernels kernels = {
        "avx2", kLanes, kMaxTile, panel_bytes, pack, quantise, multiply, store_keys, store_values,
        attention_scratch, result_floats, read_queries, attend, merge, finish};
    const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return has ? &kernels : nullptr;
}
