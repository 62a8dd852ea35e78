// How a tile is multiplied without VNNI: vpmaddubsw multiplies unsigned by signed bytes and adds two products, which fit
// into 16 bits for weights of up to 6 bits as they are stored. So do sums of some pairs, since a sum may overflow on the
// way if what it ends with fits: it begins with what the stored weights are too large by. A sub-block's sum is then
// multiplied by its scale of 8 bits and added to the block's in 32 bits; only that becomes a float.

#pragma once

#include <type_traits>

namespace {

// A sub-block's sum has 16 products of a q4_k, and of a q4_0 less its bias; or 8 of a q6_k less its bias.
static_assert(16 * 15 * 127 <= INT16_MAX && 8 * 32 * 127 <= INT16_MAX, "sums of 16 bits would overflow");
static_assert(2 * 63 * 127 <= INT16_MAX, "vpmaddubsw would saturate");

// Weights of a register times activations of each row, added to sums of 16 bits.
template <int rows> inline void add_pairs_of_rows(Ints * pairs, Ints weights, const int8_t * activations) {
    UNROLL
    for (int r = 0; r < rows; r++) {
        pairs[r] = _mm256_add_epi16(pairs[r], _mm256_maddubs_epi16(weights, four_for_all(activations + 32 * r)));
    }
    // GCC 12 would put the additions in another order and keep products in memory: 66 instead of 107 billion products a
    // second of a Q4_K by 6 rows (a core of a Zen 3).
    UNROLL
    for (int r = 0; r < rows; r++) {
        __asm__("" : "+x"(pairs[r]));
    }
}

// Scales of 8 bits, one a lane of 32 bits, times sums of 16 bits.
template <int rows> inline void add_scaled(Ints * total, Ints scales, const Ints * pairs) {
    const Ints twice = _mm256_blend_epi16(scales, _mm256_slli_epi32(scales, 16), 0xaa);
    UNROLL
    for (int r = 0; r < rows; r++) {
        total[r] = _mm256_add_epi32(total[r], _mm256_madd_epi16(pairs[r], twice));
    }
}

// Bytes fit into vpmaddubsw only by their magnitude, with the sign moved to the activation, and two products fill 16 bits.
template <int rows> inline void add_signed(Ints * total, Ints weights, const int8_t * activations) {
    const Ints magnitudes = _mm256_abs_epi8(weights);
    UNROLL
    for (int r = 0; r < rows; r++) {
        const Ints signs = _mm256_sign_epi8(four_for_all(activations + 32 * r), weights);
        const Ints pairs = _mm256_maddubs_epi16(magnitudes, signs);
        total[r] = _mm256_add_epi32(total[r], _mm256_madd_epi16(pairs, all_shorts(1)));
        __asm__("" : "+x"(total[r]));
    }
}

// q4_0 and q8_0: one scale a block of 32, for weights and for activations.
template <Format format, int rows, Hint hint>
inline void multiply_32(const uint8_t * panel, int64_t k, int64_t ahead, const Tile & tile, Sums<rows> & out) {
    const int8_t * values = tile.values;
    const float * scales = tile.scales;
    const int32_t * sums = tile.sums;
    for_blocks(format, k / 32, panel, [&](const uint8_t * weights, const uint8_t * side) {
        prefetch<hint, weight_bytes(format)>(weights, ahead);
        prefetch<hint, side_bytes(format)>(side, ahead);
        Ints total[rows];
        UNROLL
        for (int r = 0; r < rows; r++) {
            total[r] = format == Format::q4_0 ? all(sums[r]) : zero_ints();
        }
        UNROLL
        for (int v = 0; v < 8; v++) {
            if constexpr (format == Format::q4_0) {
                const Ints both = load(weights + (v % 4) * kVector);
                add_pairs_of_rows<rows>(total, v < 4 ? low_nibbles(both) : high_nibbles(both), values + 4 * v);
            } else {
                add_signed<rows>(total, load(weights + v * kVector), values + 4 * v);
            }
        }
        const Floats d = halves(side);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const Ints sum = format == Format::q4_0 ? _mm256_madd_epi16(total[r], all_shorts(1)) : total[r];
            out[r] = fma(to_float(sum), mul(d, all(scales[r])), out[r]);
        }
        values += 32 * rows;
        scales += rows;
        sums += rows;
    });
}

// q4_k: weight = d x scale x nibble - dmin x minimum, with a scale and a minimum a sub-block of 32.
template <int rows, Hint hint>
inline void multiply_q4_k(const uint8_t * panel, int64_t k, int64_t ahead, const Tile & tile, Sums<rows> & out) {
    const int8_t * values = tile.values;
    const float * scales = tile.scales;
    const int32_t * sums = tile.sums;
    for_blocks(Format::q4_k, k / 256, panel, [&](const uint8_t * weights, const uint8_t * side) {
        prefetch<hint, side_bytes(Format::q4_k)>(side, ahead);
        alignas(kVector) uint8_t scale[2 * kVector];
        alignas(kVector) uint8_t minimum[2 * kVector];
        unpack_q4_k(side, scale, minimum);
        Ints total[rows] = {};
        const auto sub_block = [&](auto high, int j) {
            const uint8_t * from = weights + (j / 2) * 8 * kVector;
            Ints pairs[rows] = {};
            UNROLL
            for (int v = 0; v < 8; v++) {
                const Ints both = load(from + v * kVector);
                add_pairs_of_rows<rows>(pairs, high ? high_nibbles(both) : low_nibbles(both), values + 4 * v);
            }
            add_scaled<rows>(total, widen_unsigned(scale + j * kLanes), pairs);
            values += 32 * rows;
        };
        for (int j = 0; j < 8; j += 2) {
            prefetch<hint, 8 * kVector>(weights + (j / 2) * 8 * kVector, ahead);
            sub_block(std::false_type{}, j);
            sub_block(std::true_type{}, j + 1);
        }
        const Floats d = halves(side);
        const Floats dmin = halves(side + 2 * kLanes);
        Ints m[4];
        for (int p = 0; p < 4; p++) {
            m[p] = widen_pairs(minimum + p * 2 * kLanes);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            Ints sum = zero_ints();
            for (int p = 0; p < 4; p++) {
                sum = dot_pairs(sum, m[p], sums[4 * r + p]);
            }
            out[r] = fma(fnma(dmin, to_float(sum), mul(d, to_float(total[r]))), all(scales[r]), out[r]);
        }
        scales += rows;
        sums += 4 * rows;
    });
}

// q6_k: weight = d x scale x (6 bits - 32), with a signed scale a sub-block of 16.
template <int rows, Hint hint>
inline void multiply_q6_k(const uint8_t * panel, int64_t k, int64_t ahead, const Tile & tile, Sums<rows> & out) {
    const int8_t * values = tile.values;
    const float * scales = tile.scales;
    const int32_t * sums = tile.sums;
    for_blocks(Format::q6_k, k / 256, panel, [&](const uint8_t * weights, const uint8_t * side) {
        prefetch<hint, side_bytes(Format::q6_k)>(side, ahead);
        Ints total[rows] = {};
        const auto sub_block = [&](auto high, auto second, int j) {
            const uint8_t * from = weights + (j / 2) * 12 * kVector;
            Ints pairs[rows];
            UNROLL
            for (int r = 0; r < rows; r++) {
                pairs[r] = all(sums[r]);
            }
            UNROLL
            for (int i = 0; i < 4; i++) {
                const Ints both = load(from + (second ? 8 + i : 2 * i) * kVector);
                const Ints bits = load(from + (2 * i + 1) * kVector);
                const Ints low = second ? shift_left<2>(bits) : shift_left<4>(bits);
                const Ints upper = !high ? low : second ? shift_right<2>(bits) : bits;
                const Ints nibbles = high ? high_nibbles(both) : low_nibbles(both);
                const Ints w = bits_or(nibbles, bits_and(upper, all_bytes(0x30)));
                add_pairs_of_rows<rows>(pairs, w, values + 16 * second + 4 * i);
            }
            add_scaled<rows>(total, widen_signed(side + (2 * j + second) * kLanes), pairs);
            sums += rows;
        };
        for (int j = 0; j < 8; j++) {  // 32 weights: two sub-blocks
            if (j % 2 == 0) {
                prefetch<hint, 12 * kVector>(weights + (j / 2) * 12 * kVector, ahead);
                sub_block(std::false_type{}, std::false_type{}, j);
                sub_block(std::false_type{}, std::true_type{}, j);
            } else {
                sub_block(std::true_type{}, std::false_type{}, j);
                sub_block(std::true_type{}, std::true_type{}, j);
            }
            values += 32 * rows;
        }
        const Floats d = halves(side + 16 * kLanes);
        UNROLL
        for (int r = 0; r < rows; r++) {
            out[r] = fma(mul(d, to_float(total[r])), all(scales[r]), out[r]);
        }
        scales += rows;
    });
}

}  // namespace
