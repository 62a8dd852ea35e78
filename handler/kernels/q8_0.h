// Q8_0: d (half), 32 signed bytes; weight = d x byte.

#pragma once

#include "format.h"

namespace {

struct Q8_0 {
    static constexpr ggml_type type = GGML_TYPE_Q8_0;
    static constexpr int length = 32, bytes = 34, group = 8, sums = 1;
    static constexpr int64_t weight_bytes = 8 * kVector, side_bytes = 2 * kLanes;
    using Kernel = Q8_0;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        std::memcpy(side + 2 * lane, block, 2);
        spread(block + 2, 8, weights, lane);
    }

    static void sum(const int8_t * bytes, int, int32_t * sums, int) { *sums = start_of_32(bytes, kByteBias); }

    template <int rows>
    static inline void multiply(const uint8_t * weights, const uint8_t * side, const Activations & x, Sums<rows> & out) {
        prefetch<rows, weight_bytes>(weights);
        prefetch<rows, side_bytes>(side);
        for_rows_of_bytes<rows>([weights](int v) { return unsigned_bytes(load(weights + v * kVector)); }, x.values, x.sums,
                                scaled_by<rows>(halves(side), x, out));
    }
};

}  // namespace
