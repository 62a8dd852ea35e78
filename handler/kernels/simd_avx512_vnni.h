// AVX-512 with VNNI: 16 lanes of 32 bits, 32 registers.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;
// 16 rows: one register for the sums of each, 8 for a block's weights, the rest for what is under way.
constexpr int kMaxTile = 16;
// dpbusd takes unsigned weights, so signed ones are shifted up by this much and the sums of activations take it back.
constexpr int kByteBias = 128;

using Ints = __m512i;
using Floats = __m512;

inline Ints load(const void * p) { return _mm512_loadu_si512(p); }
inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Ints all(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints low_nibbles(Ints x) { return _mm512_and_si512(x, _mm512_set1_epi8(0x0f)); }
inline Ints high_nibbles(Ints x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
inline Ints bits_and(Ints x, Ints y) { return _mm512_and_si512(x, y); }
inline Ints bits_or(Ints x, Ints y) { return _mm512_or_si512(x, y); }
template <int n> inline Ints shift_left(Ints x) { return _mm512_slli_epi16(x, n); }
template <int n> inline Ints shift_right(Ints x) { return _mm512_srli_epi16(x, n); }
inline Ints all_bytes(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
inline Ints unsigned_bytes(Ints x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }

// kLanes bytes, or 2 kLanes of them, to wider integers.
inline Ints widen_unsigned(const void * p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
}
inline Ints widen_signed(const void * p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p)));
}
inline Ints widen_pairs(const void * p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
}

inline Floats zero() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats to_float(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Floats halves(const void * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p)));
}
inline Floats mul(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
inline Floats fma(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
inline Floats fnma(Floats x, Floats y, Floats z) { return _mm512_fnmadd_ps(x, y, z); }
inline void store(float * p, Floats x, int64_t count) {
    if (count >= kLanes) {
        _mm512_storeu_ps(p, x);
    } else {
        _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), x);
    }
}

// Rows whose dot products are interleaved. With 4 instead of 1 products of 16 rows and prefill take 3 to 5 % less time
// on Zen 5, those of few rows as long.
constexpr int kChains = 4;

// The products of `vectors` x 4 weights a lane with as many activations of each of `rows` rows, which lie 32 bytes
// apart and are the same for all lanes.
//
// dpbusd broadcasts its operand from memory by itself ({1to16}). GCC 12 makes a vpbroadcastd of its own of the
// intrinsics: 10.8 cycles for the 8 products, conversion and scaling of a block and row, where 10.0 are possible;
// 11 to 13 % of the products of 8 to 16 rows (two cores of an EPYC, Zen 4).
template <int vectors, int largest_weight>
inline void dot(Ints * sums, int rows, const Ints * weights, const int8_t * activations) {
    struct __attribute__((may_alias, packed)) Four { int32_t bytes; };
    _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++) {
        _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++) {
            const auto * four = reinterpret_cast<const Four *>(activations + 32 * r + 4 * v);
            __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[r]) : "v"(weights[v]), "m"(*four));
        }
    }
}

// Pairs of 16 bits: x0 y0 + x1 y1 in every lane, added to `start`.
inline Ints dot_pairs(Ints start, Ints x, int32_t pair) { return _mm512_dpwssd_epi32(start, x, _mm512_set1_epi32(pair)); }

inline float largest_magnitude(const float * x, int count) {
    __m512 largest = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 16) {
        largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    }
    return _mm512_reduce_max_ps(largest);
}

// 32 floats times `factor`, rounded to the nearest bytes.
inline void round_32(const float * x, float factor, int8_t * bytes) {
    for (int i = 0; i < 32; i += 16) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor)));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(bytes + i), _mm512_cvtsepi32_epi8(rounded));
    }
}

// The sums of the lower and of the upper 16 of 32 bytes.
inline void sums_of_16(const int8_t * bytes, int32_t sums[2]) {
    for (int i = 0; i < 2; i++) {
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes + 16 * i));
        const __m128i four = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), b);
        const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        sums[i] = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
    }
}

// ---- for attention ----

constexpr int kHalves = 2 * kLanes;  // 16-bit values of a register

inline Floats load_floats(const float * p) { return _mm512_loadu_ps(p); }
inline void store_floats(float * p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats add(Floats x, Floats y) { return _mm512_add_ps(x, y); }
inline Floats sub(Floats x, Floats y) { return _mm512_sub_ps(x, y); }
inline Floats max(Floats x, Floats y) { return _mm512_max_ps(x, y); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline Ints to_int(Floats x) { return _mm512_cvtps_epi32(x); }
inline Floats to_integral(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_two(Floats x, Floats exponent) { return _mm512_scalef_ps(x, exponent); }
// x with its lowest bit set where it is at least `least`, else 0.
inline Floats odd_or_zero(Floats x, float least) {
    const Floats odd = _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), _mm512_set1_epi32(1)));
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GE_OQ), odd);
}

// Lane c of the result is the sum of the lanes of x[c], added in the same order for every c.
inline Floats sums_of_lanes(const Floats (&x)[kLanes]) {
    Floats four[4];
    for (int i = 0; i < 4; i++) {
        const Floats a = add(_mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]), _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]));
        const Floats b =
            add(_mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]), _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]));
        const __m512d c = _mm512_castps_pd(a);
        const __m512d d = _mm512_castps_pd(b);
        four[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    }
    const auto quarters = [](Floats p, Floats q) {
        return add(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
    };
    return quarters(quarters(four[0], four[1]), quarters(four[2], four[3]));
}

// The indices, from `first` on, of those of kHalves half precision numbers that are not negative.
inline int32_t * append_not_negative(const uint16_t * p, int32_t first, int32_t * indices) {
    const __mmask32 mask = ~_mm512_movepi16_mask(load(p));
    const Ints lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int part = 0; part < 2; part++) {
        const auto half = static_cast<__mmask16>(mask >> (16 * part));
        _mm512_mask_compressstoreu_epi32(indices, half, _mm512_add_epi32(lanes, all(first + 16 * part)));
        indices += __builtin_popcount(half);
    }
    return indices;
}

}  // namespace
