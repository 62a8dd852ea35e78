// AVX-512 with VNNI: 16 lanes of 32 bits, 32 registers.

#pragma once

#include <immintrin.h>

#include <cmath>
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
// 16 bytes for every 16, and every 16 put in another order.
inline Ints all_16(const void * p) { return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i *>(p))); }
inline Ints shuffle(Ints x, Ints places) { return _mm512_shuffle_epi8(x, places); }
inline Ints mul_shorts(Ints x, Ints y) { return _mm512_mullo_epi16(x, y); }
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
inline Floats brain_floats(const void * p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i *>(p))), 16));
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
#define HAS_DOT
template <int vectors>
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

inline int32_t sum_of_16(const int8_t * bytes) {
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes));
    const __m128i four = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), b);
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

// What the dot products of 16 activations begin with, where weights are stored too large by `bias`.
inline int32_t start_of_16(const int8_t * activations, int bias) { return -bias * sum_of_16(activations); }
inline int32_t add_starts(int32_t x, int32_t y) { return x + y; }

// ---- for attention ----

// A tile of its products: 24 registers for sums, 4 for columns.
constexpr int kPairQueries = 6;
constexpr int kPairVectors = 4;

inline Floats load_floats(const float * p) { return _mm512_loadu_ps(p); }
inline void store_floats(float * p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats add(Floats x, Floats y) { return _mm512_add_ps(x, y); }
inline Floats sub(Floats x, Floats y) { return _mm512_sub_ps(x, y); }
inline Floats max(Floats x, Floats y) { return _mm512_max_ps(x, y); }
inline Floats divide(Floats x, Floats y) { return _mm512_div_ps(x, y); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline float sum_of_floats(Floats x) { return _mm512_reduce_add_ps(x); }
inline Ints to_int(Floats x) { return _mm512_cvtps_epi32(x); }
inline Ints add_ints(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
inline int32_t sum_of_ints(Ints x) { return _mm512_reduce_add_epi32(x); }
inline Ints shifted_right(Ints x, int n) { return _mm512_sra_epi32(x, _mm_cvtsi32_si128(n)); }
inline Floats to_integral(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats times_power_of_two(Floats x, Floats exponent) { return _mm512_scalef_ps(x, exponent); }

// Lanes whose bit is 0 become minus infinity.
inline Floats where(uint64_t bits, Floats x) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), static_cast<__mmask16>(bits), x);
}

inline Floats or_zero(Floats x, float least) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GE_OQ), x);
}

inline void store_shorts(int16_t * p, Ints x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtsepi32_epi16(x));
}

// 8-bit numbers, multiplied.
inline Ints widen_to_shorts(const int8_t * p, int multiplier) {
    const Ints wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    return _mm512_mullo_epi16(wide, _mm512_set1_epi16(static_cast<int16_t>(multiplier)));
}

// sums[v] += the products of both 16-bit numbers of every lane with two numbers that are the same for all; as in dot(),
// their broadcast is the instruction's own.
template <int vectors> inline void add_pairs(Ints * sums, const Ints * columns, const int16_t * two) {
    struct __attribute__((may_alias, packed)) Two { int32_t shorts; };
    const auto * pair = reinterpret_cast<const Two *>(two);
    _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++) {
        __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sums[v]) : "v"(columns[v]), "m"(*pair));
    }
}

// 16-bit numbers of two registers side by side: x0 y0 x1 y1 ...
inline void interleave(Ints x, Ints y, Ints & low, Ints & high) {
    alignas(64) static constexpr int16_t order[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    low = _mm512_permutex2var_epi16(x, load(order), y);
    high = _mm512_permutex2var_epi16(x, load(order + 32), y);
}

// Lane j of x[i] becomes lane i of x[j].
inline void transpose(Ints (&x)[kLanes]) {
    Ints y[kLanes];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 4) {
        const Ints a = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        const Ints b = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        const Ints c = _mm512_unpacklo_epi32(x[i + 2], x[i + 3]);
        const Ints d = _mm512_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm512_unpacklo_epi64(a, c);
        y[i + 1] = _mm512_unpackhi_epi64(a, c);
        y[i + 2] = _mm512_unpacklo_epi64(b, d);
        y[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        const Ints a = _mm512_shuffle_i32x4(y[i], y[4 + i], 0x88);
        const Ints b = _mm512_shuffle_i32x4(y[8 + i], y[12 + i], 0x88);
        const Ints c = _mm512_shuffle_i32x4(y[i], y[4 + i], 0xdd);
        const Ints d = _mm512_shuffle_i32x4(y[8 + i], y[12 + i], 0xdd);
        x[i] = _mm512_shuffle_i32x4(a, b, 0x88);
        x[8 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
        x[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88);
        x[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}

}  // namespace
