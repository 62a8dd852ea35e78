// Q4_0: d (half), 16 bytes: weight j in the low nibble of byte j, weight 16 + j in the high one; weight = d x (nibble - 8).

#pragma once

#include "format.h"

namespace {

struct Q4_0 {
    static constexpr ggml_type type = GGML_TYPE_Q4_0;
    static constexpr int length = 32, bytes = 18, group = 8, sums = 1;
    static constexpr int64_t weight_bytes = 4 * kVector, side_bytes = 2 * kLanes;
    using Kernel = Q4_0;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        std::memcpy(side + 2 * lane, block, 2);
        spread(block + 2, 4, weights, lane);
    }

    static void sum(const int8_t * bytes, int, int32_t * sums, int) { *sums = start_of_32(bytes, 8); }

    template <int rows>
    static inline void multiply(const uint8_t * weights, const uint8_t * side, const Activations & x, Sums<rows> & out) {
        prefetch<rows, weight_bytes>(weights);
        prefetch<rows, side_bytes>(side);
        const auto unpacked = [weights](int v) {
            const Ints both = load(weights + (v % 4) * kVector);
            return v < 4 ? low_nibbles(both) : high_nibbles(both);
        };
#ifdef HAS_DOT
        Ints w[8];
        UNROLL
        for (int v = 0; v < 8; v++) {
            w[v] = unpacked(v);
        }
        multiply_32<rows>(w, side, x, out);
#else
        Ints total[rows];
        UNROLL
        for (int r = 0; r < rows; r++) {
            total[r] = all(x.sums[r]);
        }
        UNROLL
        for (int v = 0; v < 8; v++) {
            add_pairs_of_rows<rows>(total, unpacked(v), x.values + 4 * v);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            total[r] = _mm256_madd_epi16(total[r], all_shorts(1));
        }
        scale_32<rows>(total, side, x, out);
#endif
    }
};

}  // namespace
