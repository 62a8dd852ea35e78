// Q6_K: 128 bytes of low nibbles, 64 bytes of upper 2 bits, 16 signed scales, d (half); of each half of the block 64 bytes of
// nibbles and 32 of upper bits: four times 32 weights. A sub-block of 16 has a scale; weight = d x scale x (6 bits - 32).
//
// Here every 64 weights have 8 registers of nibbles, as those of Q4_K, and 4 of upper bits, in the order in which a kernel
// comes to them.

#pragma once

#include "format.h"

namespace {

struct Q6_K {
    static constexpr ggml_type type = GGML_TYPE_Q6_K;
    static constexpr int length = 256, bytes = 210, group = 1, sums = 16;
    static constexpr int64_t weight_bytes = 48 * kVector;
    static constexpr int64_t side_bytes = 5 * kVector;  // 16 scales of 8 bits, d
    using Kernel = Q6_K;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        uint8_t values[256];
        for (int half = 0; half < 2; half++) {
            for (int quarter = 0; quarter < 4; quarter++) {
                const uint8_t * low = block + 64 * half + 32 * (quarter % 2);
                const uint8_t * upper = block + 128 + 32 * half;
                for (int i = 0; i < 32; i++) {
                    values[128 * half + 32 * quarter + i] = static_cast<uint8_t>(
                        (low[i] >> (quarter < 2 ? 0 : 4) & 0x0f) | (upper[i] >> (2 * quarter) & 0x03) << 4);
                }
            }
        }
        pack_values(values, block + 192, block + 208, weights, side, lane);
    }

    static void pack_values(const uint8_t * values, const uint8_t * scales, const uint8_t * d, uint8_t * weights,
                            uint8_t * side, int lane) {
        for (int pair = 0; pair < 4; pair++) {
            const uint8_t * first = values + 64 * pair;
            const uint8_t * second = first + 32;
            uint8_t nibbles[32];
            uint8_t upper[16];
            for (int i = 0; i < 32; i++) {
                nibbles[i] = static_cast<uint8_t>((first[i] & 0x0f) | second[i] << 4);
            }
            for (int i = 0; i < 16; i++) {
                upper[i] = static_cast<uint8_t>(first[i] >> 4 | first[16 + i] >> 4 << 2 | second[i] >> 4 << 4 |
                                                second[16 + i] >> 4 << 6);
            }
            uint8_t * to = weights + 12 * pair * kVector;
            spread(nibbles, 4, to, lane, 2);
            spread(upper, 4, to + kVector, lane, 2);
            spread(nibbles + 16, 4, to + 8 * kVector, lane);
        }
        for (int j = 0; j < 16; j++) {
            side[j * kLanes + lane] = scales[j];
        }
        std::memcpy(side + 16 * kLanes + 2 * lane, d, 2);
    }

    static void sum(const int8_t * bytes, int part, int32_t * sums, int stride) {
        sums[2 * part * stride] = start_of_16(bytes, 32);
        sums[(2 * part + 1) * stride] = start_of_16(bytes + 16, 32);
    }

    template <int rows>
    static inline void multiply(const uint8_t * weights, const uint8_t * side, const Activations & x, Sums<rows> & out) {
        prefetch<rows, side_bytes>(side);
        const Floats d = halves(side + 16 * kLanes);
        Floats sub[rows];
#ifdef HAS_DOT
        UNROLL
        for (int r = 0; r < rows; r++) {
            sub[r] = zero();
        }
        for (int j = 0; j < 8; j++) {  // 32 weights: two sub-blocks
            const uint8_t * pair = weights + (j / 2) * 12 * kVector;
            if (j % 2 == 0) {
                prefetch<rows, 12 * kVector>(pair);
            }
            Ints w[8];
            UNROLL
            for (int v = 0; v < 8; v++) {
                const Ints both = load(pair + (v < 4 ? 2 * v : 4 + v) * kVector);
                const Ints bits = load(pair + (2 * (v % 4) + 1) * kVector);
                if (j % 2 == 0) {
                    const Ints upper = v < 4 ? shift_left<4>(bits) : shift_left<2>(bits);
                    w[v] = bits_or(low_nibbles(both), bits_and(upper, all_bytes(0x30)));
                } else {
                    const Ints upper = v < 4 ? bits : shift_right<2>(bits);
                    w[v] = bits_or(high_nibbles(both), bits_and(upper, all_bytes(0x30)));
                }
            }
            for (int half = 0; half < 2; half++) {
                const Floats s = mul(d, to_float(widen_signed(side + (2 * j + half) * kLanes)));
                const int32_t * starts = x.sums + (2 * j + half) * rows;
                for_rows<rows, 4>(
                    w + 4 * half, x.values + j * 32 * rows + 16 * half, [=](int r) { return all(starts[r]); },
                    [&sub, s](int r, Ints sum) { sub[r] = fma(to_float(sum), s, sub[r]); });
            }
        }
#else
        Ints total[rows] = {};
        const auto sub_block = [&](auto high, auto second, int j) {
            const uint8_t * from = weights + (j / 2) * 12 * kVector;
            Ints pairs[rows];
            UNROLL
            for (int r = 0; r < rows; r++) {
                pairs[r] = all(x.sums[(2 * j + second) * rows + r]);
            }
            UNROLL
            for (int i = 0; i < 4; i++) {
                const Ints both = load(from + (second ? 8 + i : 2 * i) * kVector);
                const Ints bits = load(from + (2 * i + 1) * kVector);
                const Ints low = second ? shift_left<2>(bits) : shift_left<4>(bits);
                const Ints upper = !high ? low : second ? shift_right<2>(bits) : bits;
                const Ints nibbles = high ? high_nibbles(both) : low_nibbles(both);
                const Ints w = bits_or(nibbles, bits_and(upper, all_bytes(0x30)));
                add_pairs_of_rows<rows>(pairs, w, x.values + j * 32 * rows + 16 * second + 4 * i);
            }
            add_scaled<rows>(total, widen_signed(side + (2 * j + second) * kLanes), pairs);
        };
        for (int j = 0; j < 8; j += 2) {
            prefetch<rows, 12 * kVector>(weights + (j / 2) * 12 * kVector);
            sub_block(std::false_type{}, std::false_type{}, j);
            sub_block(std::false_type{}, std::true_type{}, j);
            sub_block(std::true_type{}, std::false_type{}, j + 1);
            sub_block(std::true_type{}, std::true_type{}, j + 1);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            sub[r] = mul(d, to_float(total[r]));
        }
#endif
        UNROLL
        for (int r = 0; r < rows; r++) {
            out[r] = fma(sub[r], all(x.scales[r]), out[r]);
        }
    }
};

}  // namespace
