// Q4_K: d, dmin (half), 12 bytes with 8 scales and 8 minima of 6 bits, 128 bytes: of each 32 bytes the low nibbles are one
// sub-block of 32 weights, the high nibbles the next; weight = d x scale x nibble - dmin x minimum. Q5_K has 32 bytes with a
// fifth bit before these 128: bit j of byte i is of weight i of sub-block j.
//
// Here the fifth bits of every 64 weights lie before their nibbles: a register of each sub-block, whose bit v of a byte is of
// the byte in register v of nibbles.

#pragma once

#include "format.h"

namespace {

template <int bits> struct Q45_K {
    static constexpr ggml_type type = bits == 4 ? GGML_TYPE_Q4_K : GGML_TYPE_Q5_K;
    static constexpr int length = 256, bytes = bits == 4 ? 144 : 176, group = 1, sums = 4;
    static constexpr int64_t fifth_bytes = bits == 4 ? 0 : 2 * kVector, pair_bytes = fifth_bytes + 8 * kVector;
    static constexpr int64_t weight_bytes = 4 * pair_bytes;
    static constexpr int64_t side_bytes = 4 * kVector;  // d, dmin; scales and minima of 6 bits in 3 registers
    using Kernel = Q45_K;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        std::memcpy(side + 2 * lane, block, 2);
        std::memcpy(side + 2 * (kLanes + lane), block + 2, 2);
        const uint8_t * six = block + 4;
        uint8_t scale[8];
        uint8_t minimum[8];
        for (int j = 0; j < 4; j++) {
            scale[j] = six[j] & 63;
            minimum[j] = six[j + 4] & 63;
            scale[j + 4] = static_cast<uint8_t>((six[j + 8] & 0x0f) | ((six[j] >> 6) << 4));
            minimum[j + 4] = static_cast<uint8_t>((six[j + 8] >> 4) | ((six[j + 4] >> 6) << 4));
        }
        // Three registers of 8-bit fields whose upper two bits together hold the fourth: scales 0-3, scales 4-7 (a
        // sub-block after the other), minima 0-3 (two sub-blocks side by side); spread over them minima 4-7.
        uint8_t * fields = side + kVector;
        for (int j = 0; j < 4; j++) {
            const int pair = (j / 2) * 2 * kLanes + 2 * lane + j % 2;  // where minimum j of this column lies
            const uint8_t rest = minimum[j + 4];
            fields[j * kLanes + lane] |= scale[j];
            fields[kVector + j * kLanes + lane] |= scale[j + 4];
            fields[2 * kVector + pair] |= minimum[j];
            for (int part = 0; part < 3; part++) {
                fields[part * kVector + pair] |= static_cast<uint8_t>(((rest >> (2 * part)) & 3) << 6);
            }
        }
        for (int pair = 0; pair < 4; pair++) {
            uint8_t * to = weights + pair * pair_bytes;
            spread(block + bytes - 128 + 32 * pair, 8, to + fifth_bytes, lane);
            for (int i = 0; bits == 5 && i < 64; i++) {
                const int fifth = block[16 + i % 32] >> (2 * pair + i / 32) & 1;
                to[i / 32 * kVector + 4 * lane + i % 4] |= static_cast<uint8_t>(fifth << (i % 32 / 4));
            }
        }
    }

    // Sums of 32, two in a word, to be multiplied by the minima.
    static void sum(const int8_t * bytes, int part, int32_t * sums, int stride) {
        const auto half = static_cast<int16_t>(sum_of_16(bytes) + sum_of_16(bytes + 16));
        std::memcpy(reinterpret_cast<char *>(sums + part / 2 * stride) + 2 * (part % 2), &half, 2);
    }

    // Register v of a sub-block, the first or the second one of a pair; `fifths` is kept from one to the next.
    static inline Ints unpacked(const uint8_t * pair, bool second, int v, Ints & fifths) {
        const Ints both = load(pair + fifth_bytes + v * kVector);
        const Ints nibbles = second ? high_nibbles(both) : low_nibbles(both);
        if constexpr (bits == 4) {
            return nibbles;
        }
        if (v % 4 == 0) {
            const Ints all_of_them = load(pair + second * kVector);
            fifths = v == 0 ? shift_left<4>(all_of_them) : all_of_them;
        } else {
            fifths = shift_right<1>(fifths);
        }
        return bits_or(nibbles, bits_and(fifths, all_bytes(0x10)));
    }

    template <int rows>
    static inline void multiply(const uint8_t * weights, const uint8_t * side, const Activations & x, Sums<rows> & out) {
        prefetch<rows, side_bytes>(side);
        alignas(kVector) uint8_t scale[2 * kVector];
        alignas(kVector) uint8_t minimum[2 * kVector];
        unpack(side, scale, minimum);
        const Floats d = halves(side);
        Floats sub[rows];
#ifdef HAS_DOT
        UNROLL
        for (int r = 0; r < rows; r++) {
            sub[r] = zero();
        }
        for (int j = 0; j < 8; j++) {
            const uint8_t * pair = weights + (j / 2) * pair_bytes;
            if (j % 2 == 0) {
                prefetch<rows, pair_bytes>(pair);
            }
            Ints w[8];
            Ints fifths;
            UNROLL
            for (int v = 0; v < 8; v++) {
                w[v] = unpacked(pair, j % 2 != 0, v, fifths);
            }
            const Floats s = mul(d, to_float(widen_unsigned(scale + j * kLanes)));
            for_rows<rows, 8>(
                w, x.values + j * 32 * rows, [](int) { return zero_ints(); },
                [&sub, s](int r, Ints sum) { sub[r] = fma(to_float(sum), s, sub[r]); });
        }
#else
        Ints total[rows] = {};
        const auto sub_block = [&](auto high, int j) {
            Ints pairs[rows] = {};
            Ints fifths;
            UNROLL
            for (int v = 0; v < 8; v++) {
                const Ints w = unpacked(weights + (j / 2) * pair_bytes, high, v, fifths);
                add_pairs_of_rows<rows>(pairs, w, x.values + j * 32 * rows + 4 * v);
                if (bits == 5 && v == 3) {  // 16 bits hold no more of them
                    add_scaled<rows>(total, widen_unsigned(scale + j * kLanes), pairs);
                    UNROLL
                    for (int r = 0; r < rows; r++) {
                        pairs[r] = zero_ints();
                    }
                }
            }
            add_scaled<rows>(total, widen_unsigned(scale + j * kLanes), pairs);
        };
        for (int j = 0; j < 8; j += 2) {
            prefetch<rows, pair_bytes>(weights + (j / 2) * pair_bytes);
            sub_block(std::false_type{}, j);
            sub_block(std::true_type{}, j + 1);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            sub[r] = mul(d, to_float(total[r]));
        }
#endif
        const Floats dmin = halves(side + 2 * kLanes);
        Ints m[4];
        for (int p = 0; p < 4; p++) {
            m[p] = widen_pairs(minimum + p * 2 * kLanes);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            Ints sum = zero_ints();
            for (int p = 0; p < 4; p++) {
                sum = dot_pairs(sum, m[p], x.sums[p * rows + r]);
            }
            out[r] = fma(fnma(dmin, to_float(sum), sub[r]), all(x.scales[r]), out[r]);
        }
    }

    // The scales [8 sub-blocks][lane] and minima [4 pairs of sub-blocks][lane][2] of a panel's block, as bytes.
    static inline void unpack(const uint8_t * side, uint8_t * scale, uint8_t * minimum) {
        const Ints a = load(side + kVector);
        const Ints b = load(side + 2 * kVector);
        const Ints c = load(side + 3 * kVector);
        const Ints six_bits = all_bytes(0x3f);
        const auto keep = [](uint8_t * to, Ints x) { std::memcpy(to, &x, sizeof x); };
        keep(scale, bits_and(a, six_bits));
        keep(scale + kVector, bits_and(b, six_bits));
        keep(minimum, bits_and(c, six_bits));
        keep(minimum + kVector, bits_or(bits_and(shift_right<6>(a), all_bytes(0x03)),
                                        bits_or(bits_and(shift_right<4>(b), all_bytes(0x0c)),
                                                bits_and(shift_right<2>(c), all_bytes(0x30)))));
    }
};

using Q4_K = Q45_K<4>;
using Q5_K = Q45_K<5>;

}  // namespace
