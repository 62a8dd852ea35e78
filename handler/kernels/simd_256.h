// 256 bits: 8 lanes of 32 bits, 16 registers; with AVX-VNNI where the compiler is told so, else with AVX2 alone.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 8;

using Ints = __m256i;
using Floats = __m256;

inline Ints load(const void * p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
inline Ints zero_ints() { return _mm256_setzero_si256(); }
inline Ints all(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints low_nibbles(Ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(0x0f)); }
inline Ints high_nibbles(Ints x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
inline Ints bits_and(Ints x, Ints y) { return _mm256_and_si256(x, y); }
inline Ints bits_or(Ints x, Ints y) { return _mm256_or_si256(x, y); }
template <int n> inline Ints shift_left(Ints x) { return _mm256_slli_epi16(x, n); }
template <int n> inline Ints shift_right(Ints x) { return _mm256_srli_epi16(x, n); }
inline Ints all_16(const void * p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i *>(p))); }
inline Ints shuffle(Ints x, Ints places) { return _mm256_shuffle_epi8(x, places); }
inline Ints mul_shorts(Ints x, Ints y) { return _mm256_mullo_epi16(x, y); }
inline Ints all_bytes(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }

inline Ints widen_unsigned(const void * p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p)));
}
inline Ints widen_signed(const void * p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i *>(p)));
}
inline Ints widen_pairs(const void * p) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i *>(p)));
}

inline Floats zero() { return _mm256_setzero_ps(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats to_float(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Floats halves(const void * p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p))); }
inline Floats brain_floats(const void * p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i *>(p))), 16));
}
inline Floats mul(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
inline Floats fma(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }
inline Floats fnma(Floats x, Floats y, Floats z) { return _mm256_fnmadd_ps(x, y, z); }
inline void store(float * p, Floats x, int64_t count) {
    if (count >= kLanes) {
        _mm256_storeu_ps(p, x);
    } else {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane), x);
    }
}

inline Ints four_for_all(const int8_t * activations) {
    int32_t four;
    std::memcpy(&four, activations, 4);
    return _mm256_set1_epi32(four);
}

#ifdef __AVXVNNI__

#define HAS_DOT  // dot(): VNNI's products of four bytes
constexpr int kMaxTile = 4;
constexpr int kChains = 1;  // one row at a time: 16 registers have no room for more sums
constexpr int kByteBias = 128;
inline Ints unsigned_bytes(Ints x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }

template <int vectors> inline void dot(Ints * sum, int, const Ints * weights, const int8_t * activations) {
    _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++) {
        *sum = _mm256_dpbusd_avx_epi32(*sum, weights[v], four_for_all(activations + 4 * v));
    }
}

inline Ints dot_pairs(Ints start, Ints x, int32_t pair) {
    return _mm256_dpwssd_avx_epi32(start, x, _mm256_set1_epi32(pair));
}

#else

constexpr int kMaxTile = 8;  // 16 registers: the sums of 8 rows, one of weights, and what is under way
constexpr int kByteBias = 0;
inline Ints unsigned_bytes(Ints x) { return x; }
inline Ints all_shorts(int16_t x) { return _mm256_set1_epi16(x); }

inline Ints dot_pairs(Ints start, Ints x, int32_t pair) {
    return _mm256_add_epi32(start, _mm256_madd_epi16(x, _mm256_set1_epi32(pair)));
}

#endif

inline float largest_magnitude(const float * x, int count) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 largest = _mm256_setzero_ps();
    for (int i = 0; i < count; i += 8) {
        largest = _mm256_max_ps(largest, _mm256_and_ps(magnitude, _mm256_loadu_ps(x + i)));
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

inline void round_32(const float * x, float factor, int8_t * bytes) {
    const __m256 f = _mm256_set1_ps(factor);
    __m256i rounded[4];
    for (int i = 0; i < 4; i++) {
        rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), f));
    }
    // Packing works within halves of 128 bits, so the groups of four bytes have to be put in order.
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(rounded[0], rounded[1]),
                                              _mm256_packs_epi32(rounded[2], rounded[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(bytes), _mm256_permutevar8x32_epi32(packed, order));
}

inline int32_t sum_of_16(const int8_t * bytes) {
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes));
    const __m128i four = _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), b), _mm_set1_epi16(1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

// What the dot products of 16 activations begin with, where weights are stored too large by `bias`; without VNNI two
// sums of 16 bits, of the first and of the second pairs of every four.
inline int32_t start_of_16(const int8_t * activations, int bias) {
#ifdef __AVXVNNI__
    return -bias * sum_of_16(activations);
#else
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(activations));
    const __m128i eight = _mm_maddubs_epi16(_mm_set1_epi8(1), b);
    const __m128i four = _mm_add_epi16(eight, _mm_shuffle_epi32(eight, 0x4e));
    const __m128i two = _mm_add_epi16(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtsi128_si32(_mm_mullo_epi16(two, _mm_set1_epi16(static_cast<int16_t>(-bias))));
#endif
}
inline int32_t add_starts(int32_t x, int32_t y) {
#ifdef __AVXVNNI__
    return x + y;
#else
    return _mm_cvtsi128_si32(_mm_add_epi16(_mm_cvtsi32_si128(x), _mm_cvtsi32_si128(y)));
#endif
}

// ---- for attention ----

constexpr int kPairQueries = 4;
constexpr int kPairVectors = 2;

inline Floats load_floats(const float * p) { return _mm256_loadu_ps(p); }
inline void store_floats(float * p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats add(Floats x, Floats y) { return _mm256_add_ps(x, y); }
inline Floats sub(Floats x, Floats y) { return _mm256_sub_ps(x, y); }
inline Floats max(Floats x, Floats y) { return _mm256_max_ps(x, y); }
inline Floats divide(Floats x, Floats y) { return _mm256_div_ps(x, y); }
inline float largest(Floats x) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline float sum_of_floats(Floats x) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline Ints to_int(Floats x) { return _mm256_cvtps_epi32(x); }
inline Ints add_ints(Ints x, Ints y) { return _mm256_add_epi32(x, y); }
inline int32_t sum_of_ints(Ints x) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline Ints shifted_right(Ints x, int n) { return _mm256_sra_epi32(x, _mm_cvtsi32_si128(n)); }
inline Floats to_integral(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// The exponent is an integer from -126 on.
inline Floats times_power_of_two(Floats x, Floats exponent) {
    const Ints bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}

inline Floats where(uint64_t bits, Floats x) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i chosen = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 0xff)), lane);
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, lane)));
}

inline Floats or_zero(Floats x, float least) {
    return _mm256_and_ps(x, _mm256_cmp_ps(x, _mm256_set1_ps(least), _CMP_GE_OQ));
}

inline void store_shorts(int16_t * p, Ints x) {
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), shorts);
}

inline Ints widen_to_shorts(const int8_t * p, int multiplier) {
    const Ints wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return _mm256_mullo_epi16(wide, _mm256_set1_epi16(static_cast<int16_t>(multiplier)));
}

template <int vectors> inline void add_pairs(Ints * sums, const Ints * columns, const int16_t * two) {
    int32_t pair;
    std::memcpy(&pair, two, sizeof pair);
    _Pragma("GCC unroll 16") for (int v = 0; v < vectors; v++) {
        sums[v] = dot_pairs(sums[v], columns[v], pair);
    }
}

inline void interleave(Ints x, Ints y, Ints & low, Ints & high) {
    const Ints even = _mm256_unpacklo_epi16(x, y);  // of each half
    const Ints odd = _mm256_unpackhi_epi16(x, y);
    low = _mm256_permute2x128_si256(even, odd, 0x20);
    high = _mm256_permute2x128_si256(even, odd, 0x31);
}

inline void transpose(Ints (&x)[kLanes]) {
    Ints y[kLanes];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i += 4) {
        const Ints a = _mm256_unpacklo_epi32(x[i], x[i + 1]);
        const Ints b = _mm256_unpackhi_epi32(x[i], x[i + 1]);
        const Ints c = _mm256_unpacklo_epi32(x[i + 2], x[i + 3]);
        const Ints d = _mm256_unpackhi_epi32(x[i + 2], x[i + 3]);
        y[i] = _mm256_unpacklo_epi64(a, c);
        y[i + 1] = _mm256_unpackhi_epi64(a, c);
        y[i + 2] = _mm256_unpacklo_epi64(b, d);
        y[i + 3] = _mm256_unpackhi_epi64(b, d);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2x128_si256(y[i], y[4 + i], 0x20);
        x[4 + i] = _mm256_permute2x128_si256(y[i], y[4 + i], 0x31);
    }
}

}  // namespace
