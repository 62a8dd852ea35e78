// How a tile is multiplied with VNNI: dot products of a sub-block in 32 bits, which become floats to be scaled.

#pragma once

namespace {

// For every row: dot products of `vectors` x 4 weights with its activations, added to start(row) and given to
// add(row, sum). The dot products of a row wait for each other, so those of kChains rows are interleaved.
template <int rows, int vectors, typename Start, typename Add>
inline void for_rows(const Ints * weights, const int8_t * activations, Start start, Add add) {
    UNROLL
    for (int first = 0; first < rows; first += kChains) {
        const int count = rows - first < kChains ? rows - first : kChains;
        Ints sums[kChains];
        UNROLL
        for (int c = 0; c < count; c++) {
            sums[c] = start(first + c);
        }
        dot<vectors>(sums, count, weights, activations + 32 * first);
        UNROLL
        for (int c = 0; c < count; c++) {
            add(first + c, to_float(sums[c]));
        }
    }
}

// q4_0 and q8_0: one scale a block of 32, for weights and for activations.
template <Format format, int rows, Hint hint>
inline void multiply_32(const uint8_t * panel, int64_t k, int64_t ahead, const Tile & tile, Sums<rows> & out) {
    constexpr bool nibbles = format == Format::q4_0;
    const int8_t * values = tile.values;
    const float * scales = tile.scales;
    const int32_t * sums = tile.sums;
    for_blocks(format, k / 32, panel, [&](const uint8_t * weights, const uint8_t * side) {
        prefetch<hint, weight_bytes(format)>(weights, ahead);
        prefetch<hint, side_bytes(format)>(side, ahead);
        Ints w[8];
        UNROLL
        for (int v = 0; v < 8; v++) {
            if (nibbles) {
                const Ints both = load(weights + (v % 4) * kVector);
                w[v] = v < 4 ? low_nibbles(both) : high_nibbles(both);
            } else {
                w[v] = unsigned_bytes(load(weights + v * kVector));
            }
        }
        const Floats d = halves(side);
        for_rows<rows, 8>(
            w, values, [=](int r) { return all(sums[r]); },
            [=, &out](int r, Floats sum) { out[r] = fma(sum, mul(d, all(scales[r])), out[r]); });
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
        const Floats d = halves(side);
        alignas(kVector) uint8_t scale[2 * kVector];
        alignas(kVector) uint8_t minimum[2 * kVector];
        unpack_q4_k(side, scale, minimum);
        Floats sub[rows];
        UNROLL
        for (int r = 0; r < rows; r++) {
            sub[r] = zero();
        }
        for (int j = 0; j < 8; j++) {
            const uint8_t * pair = weights + (j / 2) * 8 * kVector;
            if (j % 2 == 0) {
                prefetch<hint, 8 * kVector>(pair, ahead);
            }
            Ints w[8];
            UNROLL
            for (int v = 0; v < 8; v++) {
                const Ints both = load(pair + v * kVector);
                w[v] = j % 2 == 0 ? low_nibbles(both) : high_nibbles(both);
            }
            const Floats s = mul(d, to_float(widen_unsigned(scale + j * kLanes)));
            for_rows<rows, 8>(
                w, values, [](int) { return zero_ints(); },
                [&sub, s](int r, Floats sum) { sub[r] = fma(sum, s, sub[r]); });
            values += 32 * rows;
        }
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
            out[r] = fma(fnma(dmin, to_float(sum), sub[r]), all(scales[r]), out[r]);
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
        const Floats d = halves(side + 16 * kLanes);
        Floats sub[rows];
        UNROLL
        for (int r = 0; r < rows; r++) {
            sub[r] = zero();
        }
        for (int j = 0; j < 8; j++) {  // 32 weights: two sub-blocks
            const uint8_t * pair = weights + (j / 2) * 12 * kVector;
            if (j % 2 == 0) {
                prefetch<hint, 12 * kVector>(pair, ahead);
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
                const int32_t * starts = sums + half * rows;
                for_rows<rows, 4>(
                    w + 4 * half, values + 16 * half, [=](int r) { return all(starts[r]); },
                    [&sub, s](int r, Floats sum) { sub[r] = fma(sum, s, sub[r]); });
            }
            values += 32 * rows;
            sums += 2 * rows;
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            out[r] = fma(sub[r], all(scales[r]), out[r]);
        }
        scales += rows;
    });
}

}  // namespace
