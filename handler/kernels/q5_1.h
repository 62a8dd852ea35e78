// Q5_1: d, m (half), 4 bytes with a fifth bit of each weight, 16 bytes as those of Q4_0; weight = d x 5 bits + m.
//
// Here every weight has a byte.

#pragma once

#include "format.h"

namespace {

// Weight i of a block of Q5_0 or Q5_1, whose 4 bytes with fifth bits lie before 16 bytes with nibbles.
inline uint8_t five_bits(const uint8_t * fifths, int i) {
    const int nibble = fifths[4 + i % 16] >> (i < 16 ? 0 : 4) & 0x0f;
    const int fifth = fifths[i / 8] >> (i % 8) & 1;
    return static_cast<uint8_t>(nibble | fifth << 4);
}

struct Q5_1 {
    static constexpr ggml_type type = GGML_TYPE_Q5_1;
    static constexpr int length = 32, bytes = 24, group = 4, sums = 1;
    static constexpr int64_t weight_bytes = 8 * kVector, side_bytes = 4 * kLanes;
    using Kernel = Q5_1;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        uint8_t values[32];
        for (int i = 0; i < 32; i++) {
            values[i] = five_bits(block + 4, i);
        }
        pack_values(values, block, weights, side, lane);
    }

    static void pack_values(const uint8_t * values, const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        std::memcpy(side + 2 * lane, block, 2);
        std::memcpy(side + 2 * (kLanes + lane), block + 2, 2);
        spread(values, 8, weights, lane);
    }

    static void sum(const int8_t * bytes, int, int32_t * sums, int) { *sums = sum_of_16(bytes) + sum_of_16(bytes + 16); }

    template <int rows>
    static inline void multiply(const uint8_t * weights, const uint8_t * side, const Activations & x, Sums<rows> & out) {
        prefetch<rows, weight_bytes>(weights);
        prefetch<rows, side_bytes>(side);
        const Floats d = halves(side);
        const Floats m = halves(side + 2 * kLanes);
        const auto finish = [&](int r, Ints sum) {
            out[r] = fma(fma(to_float(sum), d, mul(m, all(static_cast<float>(x.sums[r])))), all(x.scales[r]), out[r]);
        };
#ifdef HAS_DOT
        Ints w[8];
        UNROLL
        for (int v = 0; v < 8; v++) {
            w[v] = load(weights + v * kVector);
        }
        for_rows<rows, 8>(w, x.values, [](int) { return zero_ints(); }, finish);
#else
        Ints total[rows] = {};
        for (int half = 0; half < 2; half++) {  // 16 bits hold no more of them
            Ints pairs[rows] = {};
            UNROLL
            for (int v = 4 * half; v < 4 * half + 4; v++) {
                add_pairs_of_rows<rows>(pairs, load(weights + v * kVector), x.values + 4 * v);
            }
            add_scaled<rows>(total, all(1), pairs);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            finish(r, total[r]);
        }
#endif
    }
};

}  // namespace
