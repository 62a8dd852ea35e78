// F32, F16, BF16: weights as they are, no scales. Activations are not rounded either: they lie in Tile::sums, and ggml's
// routers of experts, which are never quantised, choose alike whatever the number of rows.

#pragma once

#include <bit>

#include "format.h"

namespace {

template <ggml_type of, Floats (*widen)(const void *), int size> struct FloatWeights {
    static constexpr ggml_type type = of;
    static constexpr int length = 32, bytes = length * size, group = 1, sums = length;
    static constexpr int64_t weight_bytes = length * size * kLanes, side_bytes = 0;
    using Kernel = FloatWeights;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t *, int lane) {
        for (int i = 0; i < length; i++) {
            std::memcpy(weights + (i * kLanes + lane) * size, block + i * size, size);
        }
    }

    static void keep(const float * x, int32_t * sums, int stride) {
        for (int i = 0; i < length; i++) {
            sums[i * stride] = std::bit_cast<int32_t>(x[i]);
        }
    }

    // A block's sum begins anew, so that those of several blocks are computed side by side where there are few rows.
    template <int rows>
    static inline void multiply(const uint8_t * weights, const uint8_t *, const Activations & x, Sums<rows> & out) {
        prefetch<rows, weight_bytes>(weights);
        Sums<rows> sub;
        UNROLL
        for (int r = 0; r < rows; r++) {
            sub[r] = zero();
        }
        for (int i = 0; i < length; i++) {
            const Floats w = widen(weights + i * kLanes * size);
            UNROLL
            for (int r = 0; r < rows; r++) {
                sub[r] = fma(w, all(std::bit_cast<float>(x.sums[i * rows + r])), sub[r]);
            }
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            out[r] = add(out[r], sub[r]);
        }
    }
};

inline Floats singles(const void * p) { return load_floats(static_cast<const float *>(p)); }

using F32 = FloatWeights<GGML_TYPE_F32, singles, 4>;
using F16 = FloatWeights<GGML_TYPE_F16, halves, 2>;
using BF16 = FloatWeights<GGML_TYPE_BF16, brain_floats, 2>;

}  // namespace
