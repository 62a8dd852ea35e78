// Q4_0: d (half), 16 bytes: weight j in the low nibble of byte j, weight 16 + j in the high one; weight = d x (nibble - 8).
// In IQ4_NL and MXFP4 a nibble is the number of a value, and MXFP4 has a byte e instead of d, which is 2 ^ (e - 128).

#pragma once

#include "format.h"

namespace {

// F::unpacked(nibbles) are weights that are stored too large by `bias`.
template <class F, int bias> struct Nibbles {
    static constexpr int length = 32, bytes = 18, group = 8, sums = 1;
    static constexpr int64_t weight_bytes = 4 * kVector, side_bytes = 2 * kLanes;
    using Kernel = F;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        std::memcpy(side + 2 * lane, block, 2);
        spread(block + 2, 4, weights, lane);
    }

    static void sum(const int8_t * bytes, int, int32_t * sums, int) { *sums = start_of_32(bytes, bias); }

    static inline Floats scales(const uint8_t * side) { return halves(side); }

    // Register v of 32 weights.
    static inline Ints unpacked(const uint8_t * weights, int v) {
        const Ints both = load(weights + (v % 4) * kVector);
        return F::values(v < 4 ? low_nibbles(both) : high_nibbles(both));
    }

    template <int rows>
    [[gnu::always_inline]] static inline void multiply(const uint8_t * weights, const uint8_t * side, const Activations & x,
                                                       Sums<rows> & out) {
        prefetch<rows, weight_bytes>(weights);
        prefetch<rows, side_bytes>(side);
        const auto unpacked_here = [weights](int v) { return unpacked(weights, v); };
        const auto add = scaled_by<rows>(F::scales(side), x, out);
#ifndef HAS_DOT
        if constexpr (bias != kByteBias) {  // small ones, of which 16 bits hold 16 products
            Ints total[rows];
            UNROLL
            for (int r = 0; r < rows; r++) {
                total[r] = all(x.sums[r]);
            }
            UNROLL
            for (int v = 0; v < 8; v++) {
                add_pairs_of_rows<rows>(total, unpacked_here(v), x.values + 4 * v);
            }
            UNROLL
            for (int r = 0; r < rows; r++) {
                add(r, _mm256_madd_epi16(total[r], all_shorts(1)));
            }
            return;
        }
#endif
        for_rows_of_bytes<rows>(unpacked_here, x.values, x.sums, add);
    }
};

struct Q4_0 : Nibbles<Q4_0, 8> {
    static constexpr ggml_type type = GGML_TYPE_Q4_0;

    static inline Ints values(Ints nibbles) { return nibbles; }
};

struct IQ4_NL : Nibbles<IQ4_NL, kByteBias> {
    static constexpr ggml_type type = GGML_TYPE_IQ4_NL;

    static inline Ints values(Ints nibbles) {
        static constexpr auto table =
            stored<kByteBias>({-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});
        return shuffle(all_16(table.data()), nibbles);
    }
};

// Here d is a BF16, which has the same exponents.
struct MXFP4 : Nibbles<MXFP4, 12> {
    static constexpr ggml_type type = GGML_TYPE_MXFP4;
    static constexpr int bytes = 17;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        uint8_t other[18];
        const int e = *block;
        const auto d = static_cast<uint16_t>(e < 2 ? 0x20 << e : (e - 1) << 7);
        std::memcpy(other, &d, 2);
        std::memcpy(other + 2, block + 1, 16);
        Nibbles::pack(other, weights, side, lane);
    }

    static inline Floats scales(const uint8_t * side) { return brain_floats(side); }

    static inline Ints values(Ints nibbles) {
        static constexpr auto table = stored<12>({0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12});
        return shuffle(all_16(table.data()), nibbles);
    }
};

}  // namespace
