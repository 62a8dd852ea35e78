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
#ifdef HAS_DOT
        Ints w[8];
        UNROLL
        for (int v = 0; v < 8; v++) {
            w[v] = unsigned_bytes(load(weights + v * kVector));
        }
        multiply_32<rows>(w, side, x, out);
#else
        Ints total[rows] = {};
        UNROLL
        for (int v = 0; v < 8; v++) {
            add_signed<rows>(total, load(weights + v * kVector), x.values + 4 * v);
        }
        scale_32<rows>(total, side, x, out);
#endif
    }

#ifndef HAS_DOT
    // Bytes fit into vpmaddubsw only by their magnitude, with the sign moved to the activation, and two products fill 16
    // bits.
    template <int rows> static inline void add_signed(Ints * total, Ints weights, const int8_t * activations) {
        const Ints magnitudes = _mm256_abs_epi8(weights);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const Ints signs = _mm256_sign_epi8(four_for_all(activations + 32 * r), weights);
            const Ints pairs = _mm256_maddubs_epi16(magnitudes, signs);
            total[r] = _mm256_add_epi32(total[r], _mm256_madd_epi16(pairs, all_shorts(1)));
            __asm__("" : "+x"(total[r]));
        }
    }
#endif
};

}  // namespace
