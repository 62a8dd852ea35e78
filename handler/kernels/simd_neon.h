// NEON: 4 lanes of 32 bits, 32 registers; with dot products of bytes (dotprod) or matrix products of bytes (i8mm) where the
// compiler is told so. The sizes of tiles are by the number of registers; their speed has not been measured.

#pragma once

#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 4;
constexpr int kMaxTile = 8;
constexpr int kByteBias = 0;  // products are of signed bytes

using Ints = int32x4_t;
using Floats = float32x4_t;

inline uint8x16_t bytes_of(Ints x) { return vreinterpretq_u8_s32(x); }
inline int8x16_t signed_bytes_of(Ints x) { return vreinterpretq_s8_s32(x); }
inline Ints of_bytes(uint8x16_t x) { return vreinterpretq_s32_u8(x); }
inline uint16x8_t shorts_of(Ints x) { return vreinterpretq_u16_s32(x); }
inline Ints of_shorts(uint16x8_t x) { return vreinterpretq_s32_u16(x); }

inline Ints load(const void * p) { return of_bytes(vld1q_u8(static_cast<const uint8_t *>(p))); }
inline Ints zero_ints() { return vdupq_n_s32(0); }
inline Ints all(int32_t x) { return vdupq_n_s32(x); }
inline Ints low_nibbles(Ints x) { return of_bytes(vandq_u8(bytes_of(x), vdupq_n_u8(0x0f))); }
inline Ints high_nibbles(Ints x) { return of_bytes(vshrq_n_u8(bytes_of(x), 4)); }
inline Ints bits_and(Ints x, Ints y) { return vandq_s32(x, y); }
inline Ints bits_or(Ints x, Ints y) { return vorrq_s32(x, y); }
template <int n> inline Ints shift_left(Ints x) { return of_shorts(vshlq_n_u16(shorts_of(x), n)); }
template <int n> inline Ints shift_right(Ints x) { return of_shorts(vshrq_n_u16(shorts_of(x), n)); }
inline Ints all_16(const void * p) { return load(p); }
inline Ints shuffle(Ints x, Ints places) { return of_bytes(vqtbl1q_u8(bytes_of(x), bytes_of(places))); }
inline Ints mul_shorts(Ints x, Ints y) { return of_shorts(vmulq_u16(shorts_of(x), shorts_of(y))); }
inline Ints all_bytes(int x) { return of_bytes(vdupq_n_u8(static_cast<uint8_t>(x))); }
inline Ints unsigned_bytes(Ints x) { return x; }

// kLanes bytes, or 2 kLanes of them, to wider integers.
inline int32_t four_bytes(const void * p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return four;
}
inline Ints widen_pairs(const void * p) { return of_shorts(vmovl_u8(vld1_u8(static_cast<const uint8_t *>(p)))); }
inline Ints widen_unsigned(const void * p) {
    const uint16x8_t shorts = vmovl_u8(vreinterpret_u8_s32(vdup_n_s32(four_bytes(p))));
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(shorts)));
}
inline Ints widen_signed(const void * p) {
    const int16x8_t shorts = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four_bytes(p))));
    return vmovl_s16(vget_low_s16(shorts));
}

inline Floats zero() { return vdupq_n_f32(0); }
inline Floats all(float x) { return vdupq_n_f32(x); }
inline Floats to_float(Ints x) { return vcvtq_f32_s32(x); }
inline Floats halves(const void * p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(static_cast<const uint8_t *>(p))));
}
inline Floats brain_floats(const void * p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(static_cast<const uint8_t *>(p))), 16));
}
inline Floats mul(Floats x, Floats y) { return vmulq_f32(x, y); }
inline Floats fma(Floats x, Floats y, Floats z) { return vfmaq_f32(z, x, y); }
inline Floats fnma(Floats x, Floats y, Floats z) { return vfmsq_f32(z, x, y); }
inline void store(float * p, Floats x, int64_t count) {
    if (count >= kLanes) {
        vst1q_f32(p, x);
    } else {
        std::memcpy(p, &x, static_cast<size_t>(count) * sizeof *p);
    }
}

#define HAS_DOT
constexpr int kChains = 4;

#ifdef __ARM_FEATURE_DOTPROD
// For every row: the products of 16 weights a lane.
template <int vectors> inline Ints dot_row(Ints sum, const Ints * weights, const int8_t * activations) {
    _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v += 4) {
        const int8x16_t x = vld1q_s8(activations + 4 * v);
        sum = vdotq_laneq_s32(sum, signed_bytes_of(weights[v]), x, 0);
        sum = vdotq_laneq_s32(sum, signed_bytes_of(weights[v + 1]), x, 1);
        sum = vdotq_laneq_s32(sum, signed_bytes_of(weights[v + 2]), x, 2);
        sum = vdotq_laneq_s32(sum, signed_bytes_of(weights[v + 3]), x, 3);
    }
    return sum;
}
#else
// Two products of bytes fit into 16 bits: 2 x 128 x 127.
template <int vectors> inline Ints dot_row(Ints sum, const Ints * weights, const int8_t * activations) {
    Ints left = zero_ints();  // of the first two lanes, two sums each
    Ints right = zero_ints();
    _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v += 2) {
        const int8x16_t w = signed_bytes_of(weights[v]);
        const int8x16_t next_w = signed_bytes_of(weights[v + 1]);
        const int8x16_t x = signed_bytes_of(all(four_bytes(activations + 4 * v)));
        const int8x16_t next_x = signed_bytes_of(all(four_bytes(activations + 4 * v + 4)));
        left = vpadalq_s16(left, vmlal_s8(vmull_s8(vget_low_s8(w), vget_low_s8(x)), vget_low_s8(next_w), vget_low_s8(next_x)));
        right = vpadalq_s16(right, vmlal_high_s8(vmull_high_s8(w, x), next_w, next_x));
    }
    return vaddq_s32(sum, vpaddq_s32(left, right));
}
#endif

// As that of simd_avx512_vnni.h.
template <int vectors>
inline void dot(Ints * sums, int rows, const Ints * weights, const int8_t * activations) {
    int row = 0;
#ifdef __ARM_FEATURE_MATMUL_INT8
    // A matrix product is of two rows with two columns, 8 numbers of each.
    _Pragma("GCC unroll 16") for (; row + 1 < rows; row += 2) {
        const int8_t * x = activations + 32 * row;
        Ints left = zero_ints();  // columns 0 and 1 of the first row, then of the second
        Ints right = zero_ints();
        _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v += 2) {
            const int8x16_t both = vcombine_s8(vld1_s8(x + 4 * v), vld1_s8(x + 32 + 4 * v));
            left = vmmlaq_s32(left, both, signed_bytes_of(vzip1q_s32(weights[v], weights[v + 1])));
            right = vmmlaq_s32(right, both, signed_bytes_of(vzip2q_s32(weights[v], weights[v + 1])));
        }
        const int64x2_t l = vreinterpretq_s64_s32(left);
        const int64x2_t r = vreinterpretq_s64_s32(right);
        sums[row] = vaddq_s32(sums[row], vreinterpretq_s32_s64(vzip1q_s64(l, r)));
        sums[row + 1] = vaddq_s32(sums[row + 1], vreinterpretq_s32_s64(vzip2q_s64(l, r)));
    }
#endif
    _Pragma("GCC unroll 16") for (; row < rows; row++) {
        sums[row] = dot_row<vectors>(sums[row], weights, activations + 32 * row);
    }
}

// Pairs of 16 bits: x0 y0 + x1 y1 in every lane, added to `start`.
inline Ints dot_pairs(Ints start, Ints x, int32_t pair) {
    const int16x4_t y = vreinterpret_s16_s32(vdup_n_s32(pair));
    return vmlal_lane_s16(vmlal_lane_s16(start, vmovn_s32(x), y, 0), vshrn_n_s32(x, 16), y, 1);
}

inline float largest_magnitude(const float * x, int count) {
    Floats largest = zero();
    for (int i = 0; i < count; i += kLanes) {
        largest = vmaxq_f32(largest, vabsq_f32(vld1q_f32(x + i)));
    }
    return vmaxvq_f32(largest);
}

inline void round_32(const float * x, float factor, int8_t * bytes) {
    for (int i = 0; i < 32; i += 8) {
        const int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), factor)));
        const int16x4_t high = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4), factor)));
        vst1_s8(bytes + i, vqmovn_s16(vcombine_s16(low, high)));
    }
}

inline int32_t sum_of_16(const int8_t * bytes) { return vaddlvq_s8(vld1q_s8(bytes)); }

// What the dot products of 16 activations begin with, where weights are stored too large by `bias`.
inline int32_t start_of_16(const int8_t * activations, int bias) { return -bias * sum_of_16(activations); }
inline int32_t add_starts(int32_t x, int32_t y) { return x + y; }

// ---- for attention ----

constexpr int kPairQueries = 4;
constexpr int kPairVectors = 4;

inline Floats load_floats(const float * p) { return vld1q_f32(p); }
inline void store_floats(float * p, Floats x) { vst1q_f32(p, x); }
inline Floats add(Floats x, Floats y) { return vaddq_f32(x, y); }
inline Floats sub(Floats x, Floats y) { return vsubq_f32(x, y); }
inline Floats max(Floats x, Floats y) { return vmaxq_f32(x, y); }
inline Floats divide(Floats x, Floats y) { return vdivq_f32(x, y); }
inline float largest(Floats x) { return vmaxvq_f32(x); }
inline float sum_of_floats(Floats x) { return vaddvq_f32(x); }
inline Ints to_int(Floats x) { return vcvtnq_s32_f32(x); }
inline Ints add_ints(Ints x, Ints y) { return vaddq_s32(x, y); }
inline int32_t sum_of_ints(Ints x) { return vaddvq_s32(x); }
inline Ints shifted_right(Ints x, int n) { return vshlq_s32(x, vdupq_n_s32(-n)); }
inline Floats to_integral(Floats x) { return vrndnq_f32(x); }
// The exponent is an integer from -126 on.
inline Floats times_power_of_two(Floats x, Floats exponent) {
    const Ints bits = vshlq_n_s32(vaddq_s32(to_int(exponent), vdupq_n_s32(127)), 23);
    return vmulq_f32(x, vreinterpretq_f32_s32(bits));
}

inline Floats where(uint64_t bits, Floats x) {
    static constexpr uint32_t lane[kLanes] = {1, 2, 4, 8};
    const uint32x4_t chosen = vtstq_u32(vdupq_n_u32(static_cast<uint32_t>(bits)), vld1q_u32(lane));
    return vbslq_f32(chosen, x, vdupq_n_f32(-INFINITY));
}

inline Floats or_zero(Floats x, float least) { return vbslq_f32(vcgeq_f32(x, vdupq_n_f32(least)), x, zero()); }

inline void store_shorts(int16_t * p, Ints x) { vst1_s16(p, vqmovn_s32(x)); }

inline Ints widen_to_shorts(const int8_t * p, int multiplier) {
    return vreinterpretq_s32_s16(vmulq_n_s16(vmovl_s8(vld1_s8(p)), static_cast<int16_t>(multiplier)));
}

template <int vectors> inline void add_pairs(Ints * sums, const Ints * columns, const int16_t * two) {
    const int32_t pair = four_bytes(two);
    _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++) {
        sums[v] = dot_pairs(sums[v], columns[v], pair);
    }
}

inline void interleave(Ints x, Ints y, Ints & low, Ints & high) {
    low = of_shorts(vzip1q_u16(shorts_of(x), shorts_of(y)));
    high = of_shorts(vzip2q_u16(shorts_of(x), shorts_of(y)));
}

inline void transpose(Ints (&x)[kLanes]) {
    const auto wide = [](Ints y) { return vreinterpretq_s64_s32(y); };
    const int64x2_t a = wide(vtrn1q_s32(x[0], x[1]));
    const int64x2_t b = wide(vtrn2q_s32(x[0], x[1]));
    const int64x2_t c = wide(vtrn1q_s32(x[2], x[3]));
    const int64x2_t d = wide(vtrn2q_s32(x[2], x[3]));
    x[0] = vreinterpretq_s32_s64(vtrn1q_s64(a, c));
    x[1] = vreinterpretq_s32_s64(vtrn1q_s64(b, d));
    x[2] = vreinterpretq_s32_s64(vtrn2q_s64(a, c));
    x[3] = vreinterpretq_s32_s64(vtrn2q_s64(b, d));
}

}  // namespace
