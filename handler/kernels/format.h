// What the weight formats are written with. Each is a struct:
//
//   type, length, bytes          ggml's type; the weights of a block, and its bytes in a GGUF file
//   weight_bytes, side_bytes     of a panel's block: its weights, and the scales that lie before them
//   group                        blocks whose scales lie together, as many as make whole vectors
//   sums                         words of a block and row in Tile::sums
//   pack(block, weights, side, lane)   a block of GGUF's into a column of a panel's block
//   Kernel                       the struct itself; where another one is packed as (transcoded.h), that
//   sum(bytes, part, sums, stride)     the words for 32 activations, the `part`th of a block; word i is sums[i * stride];
//                                      or keep(x, sums, stride) where activations are not rounded
//   multiply<rows>(weights, side, x, out)   add the products of a panel's block with a tile's activations
//
// A format is added as such a struct, and as a row of kFormats in product.h.
//
// Products are of unsigned by signed bytes; NEON's are of signed bytes, which these weights fit into, too. 4-bit weights are
// stored as w + 8 (q4_0), w + 32 (q6_k) or are unsigned anyway (q4_k); what the shift adds is 8 (or 32) times the sum of the
// activations, and every integer sum begins with minus that, from Tile::sums. With VNNI or NEON (HAS_DOT) dot products of a
// sub-block have 32 bits, and become floats to be scaled.
//
// Without, vpmaddubsw adds two products, which fit into 16 bits for weights of up to 6 bits as they are stored. So do sums
// of some pairs, since a sum may overflow on the way if what it ends with fits. A sub-block's sum is then multiplied by its
// scale of 8 bits and added to the block's in 32 bits; only that becomes a float.

#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "kernels.h"

// Loops over the rows of a tile and the registers of a block: only unrolled do their arrays stay in registers.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

using namespace specserve;

constexpr int kVector = 4 * kLanes;  // bytes of a register

// Bytes to 4-byte groups: group g of a column goes to lane `lane` of one of every `apart` registers.
inline void spread(const uint8_t * from, int groups, uint8_t * to, int lane, int apart = 1) {
    for (int g = 0; g < groups; g++) {
        std::memcpy(to + g * apart * kVector + 4 * lane, from + 4 * g, 4);
    }
}

// What a product begins with where weights are stored too large by `bias`.
inline int32_t start_of_32(const int8_t * activations, int bias) {
    return add_starts(start_of_16(activations, bias), start_of_16(activations + 16, bias));
}

// Zen 4 and 5 fetch the weights of few rows by themselves, since they meet their lines in order; with more rows they compute
// so long between two lines that they have to be asked, and Zen 3 and Intel's always (benchmarks/decisions/tried.md).
constexpr int kFewRows = 2;
constexpr int64_t kAhead = 24 << 10;  // bytes
#ifdef __aarch64__
constexpr bool kAsksForFewRows = false;  // not measured
#elif defined HAS_DOT
const bool kAsksForFewRows = __builtin_cpu_is("intel");
#else
constexpr bool kAsksForFewRows = true;
#endif

// GCC would drop a loop of __builtin_prefetch, as if it did nothing.
inline void ask_for(const char * line) {
#ifdef __aarch64__
    __asm__ volatile("prfm pldl2keep, %0" : : "Q"(*line));
#else
    __asm__ volatile("prefetcht1 %0" : : "m"(*line));
#endif
}

template <int rows, int64_t bytes> inline void prefetch(const uint8_t * from) {
    if (rows <= kFewRows && !kAsksForFewRows) {
        return;
    }
    for (int64_t i = 0; i < bytes; i += 64) {
        ask_for(reinterpret_cast<const char *>(from) + kAhead + i);
    }
}

// A tile's activations from a block on.
struct Activations {
    const int8_t * values;
    const float * scales;
    const int32_t * sums;
};

template <int rows> using Sums = Floats[rows];

#ifdef HAS_DOT

// For every row: dot products of `vectors` x 4 weights with its activations, added to start(row) and given to
// add(row, sums). The dot products of a row wait for each other, so those of kChains rows are interleaved.
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
            add(first + c, sums[c]);
        }
    }
}

#else

// A sum has 16 products of a q4_k, and of a q4_0 or mxfp4 less its bias; or 8 of a q5_k or q5_1, and of a q6_k less its bias.
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

// Scales of 16 bits, each twice in a lane of 32 bits, times sums of 16 bits.
template <int rows> inline void add_scaled_twice(Ints * total, Ints twice, const Ints * pairs) {
    UNROLL
    for (int r = 0; r < rows; r++) {
        total[r] = _mm256_add_epi32(total[r], _mm256_madd_epi16(pairs[r], twice));
    }
}
template <int rows> inline void add_scaled(Ints * total, Ints scales, const Ints * pairs) {
    add_scaled_twice<rows>(total, _mm256_blend_epi16(scales, _mm256_slli_epi32(scales, 16), 0xaa), pairs);
}

// Bytes fit into vpmaddubsw only by their magnitude, with the sign moved to the activation, and two products fill 16
// bits.
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

#endif

// 32 weights that take whole bytes, stored too large by kByteBias: register v of them is unpacked(v), and the sums go to
// add(row, sums).
template <int rows, typename Unpacked, typename Add>
[[gnu::always_inline]] inline void for_rows_of_bytes(Unpacked unpacked, const int8_t * activations, const int32_t * starts,
                                                     Add add) {
#ifdef HAS_DOT
    Ints weights[8];
    UNROLL
    for (int v = 0; v < 8; v++) {
        weights[v] = unpacked(v);
    }
    for_rows<rows, 8>(weights, activations, [starts](int r) { return all(starts[r]); }, add);
#else
    static_assert(kByteBias == 0);
    (void) starts;
    Ints total[rows] = {};
    UNROLL
    for (int v = 0; v < 8; v++) {
        add_signed<rows>(total, unpacked(v), activations + 4 * v);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        add(r, total[r]);
    }
#endif
}

// What to do with the sums of a block with one scale.
template <int rows> inline auto scaled_by(Floats d, const Activations & x, Sums<rows> & out) {
    return [d, scales = x.scales, &out](int r, Ints sum) { out[r] = fma(to_float(sum), mul(d, all(scales[r])), out[r]); };
}

// The 16 values of a table, too large by `bias`.
template <int bias> constexpr std::array<uint8_t, 16> stored(const std::array<int8_t, 16> & values) {
    std::array<uint8_t, 16> bytes{};
    std::transform(values.begin(), values.end(), bytes.begin(), [](int x) { return static_cast<uint8_t>(x + bias); });
    return bytes;
}

}  // namespace
