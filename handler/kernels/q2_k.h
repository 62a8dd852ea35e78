// Q2_K: 16 bytes with a scale (low nibble) and a minimum each, 64 bytes of 2 bits, d, dmin (half); bits 2j and 2j + 1 of 32
// bytes are two sub-blocks of 16 weights; weight = d x scale x (2 bits) - dmin x minimum.
//
// A scale times 2 bits is a byte, so a block's sum needs no float but its last.

#pragma once

#include "format.h"

namespace {

struct Q2_K {
    static constexpr ggml_type type = GGML_TYPE_Q2_K;
    static constexpr int length = 256, bytes = 84, group = 1, sums = 8;
    static constexpr int64_t half_bytes = 8 * kVector, weight_bytes = 2 * half_bytes;
    static constexpr int64_t side_bytes = 5 * kVector;  // scales and minima of two sub-blocks side by side; d, dmin
    using Kernel = Q2_K;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        for (int pair = 0; pair < 8; pair++) {
            std::memcpy(side + 2 * (pair * kLanes + lane), block + 2 * pair, 2);
        }
        std::memcpy(side + 2 * (8 * kLanes + lane), block + 80, 2);
        std::memcpy(side + 2 * (9 * kLanes + lane), block + 82, 2);
        spread(block + 16, 16, weights, lane);
    }

    // Sums of 16, two in a word, to be multiplied by the minima.
    static void sum(const int8_t * bytes, int part, int32_t * sums, int stride) {
        const int16_t both[2] = {static_cast<int16_t>(sum_of_16(bytes)), static_cast<int16_t>(sum_of_16(bytes + 16))};
        std::memcpy(sums + part * stride, both, 4);
    }

    template <int rows>
    static inline void multiply(const uint8_t * weights, const uint8_t * side, const Activations & x, Sums<rows> & out) {
        prefetch<rows, side_bytes>(side);
        Ints total[rows];
        UNROLL
        for (int r = 0; r < rows; r++) {
            total[r] = zero_ints();
        }
        for (int pair = 0; pair < 8; pair++) {
            const uint8_t * from = weights + pair / 4 * half_bytes;
            prefetch<rows, half_bytes / 4>(weights + pair * half_bytes / 4);
            const auto unpacked = [from, pair](int v) {
                return bits_and(shifted_right(load(from + v * kVector), 2 * (pair % 4)), all_bytes(3));
            };
            const Ints both = widen_pairs(side + pair * 2 * kLanes);
            const Ints scales[2] = {of_one<0>(both), of_one<1>(both)};
            const int8_t * activations = x.values + pair * 32 * rows;
#ifdef HAS_DOT
            Ints w[8];
            UNROLL
            for (int v = 0; v < 8; v++) {
                w[v] = mul_shorts(unpacked(v), scales[v / 4]);
            }
            for_rows<rows, 8>(
                w, activations, [](int) { return zero_ints(); },
                [&total](int r, Ints sum) { total[r] = add_ints(total[r], sum); });
#else
            UNROLL
            for (int half = 0; half < 2; half++) {
                Ints pairs[rows] = {};
                UNROLL
                for (int v = 4 * half; v < 4 * half + 4; v++) {
                    add_pairs_of_rows<rows>(pairs, unpacked(v), activations + 4 * v);
                }
                add_scaled_twice<rows>(total, scales[half], pairs);
            }
#endif
        }
        const Floats d = halves(side + 16 * kLanes);
        const Floats dmin = halves(side + 18 * kLanes);
        Ints minima[8];
        for (int pair = 0; pair < 8; pair++) {
            minima[pair] = shift_right<4>(widen_pairs(side + pair * 2 * kLanes));
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            Ints sum = zero_ints();
            for (int pair = 0; pair < 8; pair++) {
                sum = dot_pairs(sum, minima[pair], x.sums[pair * rows + r]);
            }
            out[r] = fma(fnma(dmin, to_float(sum), mul(d, to_float(total[r]))), all(x.scales[r]), out[r]);
        }
    }

    // The scales of one sub-block of two, each twice in a lane.
    template <int which> static inline Ints of_one(Ints both) {
        static constexpr auto places = [] {
            std::array<uint8_t, 16> all{};
            for (int i = 0; i < 16; i++) {
                all[i] = static_cast<uint8_t>(i / 4 * 4 + 2 * which + i % 2);
            }
            return all;
        }();
        return shuffle(bits_and(both, all_bytes(0x0f)), all_16(places.data()));
    }
};

}  // namespace
