// IQ4_XS: d (half), 2 bytes with the upper 2 bits of 8 scales, 4 bytes with their lower 4, 128 bytes: 8 sub-blocks with
// nibbles as those of IQ4_NL; weight = d x (scale - 32) x value.

#pragma once

#include "q4_0.h"

namespace {

struct IQ4_XS {
    static constexpr ggml_type type = GGML_TYPE_IQ4_XS;
    static constexpr int length = 256, bytes = 136, group = 2, sums = 8;
    static constexpr int64_t weight_bytes = 8 * IQ4_NL::weight_bytes;
    static constexpr int64_t side_bytes = 10 * kLanes;  // 8 scales of 8 bits, d
    using Kernel = IQ4_XS;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        for (int j = 0; j < 8; j++) {
            const int low = block[4 + j / 2] >> (4 * (j % 2)) & 0x0f;
            const int upper = block[2 + j / 4] >> (2 * (j % 4)) & 3;
            side[j * kLanes + lane] = static_cast<uint8_t>((low | upper << 4) - 32);
            spread(block + 8 + 16 * j, 4, weights + j * IQ4_NL::weight_bytes, lane);
        }
        std::memcpy(side + 8 * kLanes + 2 * lane, block, 2);
    }

    static void sum(const int8_t * bytes, int part, int32_t * sums, int stride) {
        sums[part * stride] = start_of_32(bytes, kByteBias);
    }

    template <int rows>
    static inline void multiply(const uint8_t * weights, const uint8_t * side, const Activations & x, Sums<rows> & out) {
        prefetch<rows, side_bytes>(side);
        const Floats d = halves(side + 8 * kLanes);
        Floats sub[rows];
        UNROLL
        for (int r = 0; r < rows; r++) {
            sub[r] = zero();
        }
        for (int j = 0; j < 8; j++) {
            prefetch<rows, IQ4_NL::weight_bytes>(weights);
            const Floats s = mul(d, to_float(widen_signed(side + j * kLanes)));
            for_rows_of_bytes<rows>(
                [weights](int v) { return IQ4_NL::unpacked(weights, v); }, x.values + j * 32 * rows, x.sums + j * rows,
                [&sub, s](int r, Ints sum) { sub[r] = fma(to_float(sum), s, sub[r]); });
            weights += IQ4_NL::weight_bytes;
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            out[r] = fma(sub[r], all(x.scales[r]), out[r]);
        }
    }
};

}  // namespace
