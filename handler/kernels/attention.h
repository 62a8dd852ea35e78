// Attention over the 16-bit cache (cache.h), written once over the vector operations of a simd_*.h.
//
// For one row and one query head: scores s_i = q . k_i over the positions i that the row may see, weights
// p_i = 2^(s_i - max s), result sum(p_i v_i) / sum(p_i). (Queries are scaled by log2 e, for 2^x is less work than e^x.)
//
// Texts are promised to be the same in any company, so a row's result must not depend on which other rows, chunks and
// threads there are, nor on where in the cache its tokens lie. Positions are divided into chunks of kChunk, and these into
// blocks of kBlock:
//
// - Within a block all sums are of integers, and so exact in any order: 16-bit queries with 16-bit keys, 16-bit weights
//   with 16-bit values, both by vpdpwssd or its like, which multiplies twice as many numbers an instruction as a float FMA does.
// - The blocks of a chunk are added in their order, relative to the chunk's largest score. A chunk's result is a function
//   of the row and of the chunk; chunks are computed by whatever threads, and added in their order.
//
// How large the integers may be, so that no sum of 32 bits overflows:
// - Queries and keys have a Euclidean norm of at most kNorm and 12 for rounding: by Cauchy and Schwarz no partial sum of
//   their products is larger than (kNorm + 12)^2 < 2^31.
// - Values are at most kMaxValue, and a block's weights add up to at most 2^17: 2^17 x kMaxValue < 2^31. Where keys are
//   the values, half of that: 2^16 x kMaxKey < 2^31.
// The 8-bit cache rounds 32 numbers to multiples of a 127th of the largest, so that norms grow by at most 1,000: the
// square root of 8 times (44,000 / 127 + the square root of size / 32).
// So a key's error is 2^-16 of the larger of its largest component and .7 of its norm, a value's 2^-15 of its largest
// component. Half precision rounds the largest by as much as 2^-12.

#pragma once

#include <algorithm>
#include <cmath>

#include "format.h"

namespace {

constexpr float kNorm = 46000;
constexpr float kMaxShort = 32767;
constexpr float kMaxKey = 127 * 255;
constexpr float kMaxValue = 16383;
constexpr float kNormOf8Bits = 44000;
constexpr int32_t kMaxWeights = (1 << 17) - kBlock / 2;  // of a block, before they are rounded
constexpr float kLeastWeight = 0x1p-30F;                 // of a chunk's largest; less is nothing
constexpr float kUnit = 0x1p22F;                         // weights are added up in units of 1 / kUnit
constexpr float kLog2E = 1.44269504F;
constexpr int kWeightPairs = kBlock / 2;
// Queries whose products take less time than memory takes to answer: the next block is asked for while this one is turned.
constexpr int64_t kFewQueries = 2 * kPairQueries;

// 2^x for x <= 0, at least 2^-126; relative error 2e-7.
inline Floats exp2_of_negative(Floats x) {
    x = max(x, all(-126.0F));
    const Floats n = to_integral(x);
    const Floats r = sub(x, n);
    Floats y = all(1.54035304e-4F);  // ln(2)^i / i!, for |r| <= 1/2
    y = fma(y, r, all(1.33335581e-3F));
    y = fma(y, r, all(9.61812911e-3F));
    y = fma(y, r, all(5.55041087e-2F));
    y = fma(y, r, all(2.40226507e-1F));
    y = fma(y, r, all(6.93147181e-1F));
    y = fma(y, r, all(1.0F));
    return times_power_of_two(y, n);
}

inline float exp2_of_negative(float x) {
    float lanes[kLanes];
    store_floats(lanes, exp2_of_negative(all(x)));
    return lanes[0];
}

// The score softcap * tanh(s / softcap), times log2 e as x and the result are.
inline Floats capped(Floats x, float softcap) {
    const Floats factor = all(-2 / softcap);
    const Floats p = exp2_of_negative(mul(max(sub(zero(), x), zero()), factor));
    const Floats n = exp2_of_negative(mul(max(x, zero()), factor));
    return mul(divide(sub(p, n), add(p, n)), all(softcap * kLog2E));
}

// ---- numbers to 16 bits ----

inline float sum_of_squares(const float * x, int64_t size) {
    Floats squares = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        const Floats v = load_floats(x + i);
        squares = fma(v, v, squares);
    }
    return sum_of_floats(squares);
}

// Returns what one unit is worth; not a number where the source has something that is none.
inline float round_to_shorts(const float * source, int64_t size, float factor, int16_t * to) {
    for (int64_t i = 0; i < size; i += kLanes) {
        store_shorts(to + i, to_int(mul(load_floats(source + i), all(factor))));
    }
    return 1 / factor;
}

inline float round_to_bytes(const float * source, int64_t size, float factor, int8_t * to, uint8_t * multipliers) {
    for (int64_t i = 0; i < size; i += kTogether) {
        const float largest = factor * largest_magnitude(source + i, kTogether);
        const float multiplier = largest > 127 ? std::min(std::ceil(largest / 127), 255.0F) : 1;
        multipliers[i / kTogether] = static_cast<uint8_t>(multiplier);
        round_32(source + i, factor / multiplier, to + i);
    }
    return 1 / factor;
}

// The factor that makes a head's numbers as large as they may be; 0 where all are zero.
inline float factor_of_key(const float * source, int64_t size, float norm) {
    const float squares = sum_of_squares(source, size);
    const float largest = largest_magnitude(source, static_cast<int>(size));
    return squares == 0 ? 0 : std::min(kMaxKey / largest, norm / std::sqrt(squares));
}

inline float factor_of_value(const float * source, int64_t size) {
    const float largest = largest_magnitude(source, static_cast<int>(size));
    return largest == 0 ? 0 : kMaxValue / largest;
}

template <class Factor> inline void store(const float * source, const Stored & stored, int64_t cell, Factor factor_of) {
    for (int64_t head = 0; head < stored.heads; head++, source += stored.size) {
        const float factor = factor_of(source);
        char * to = stored.at(head, cell);
        if (factor == 0) {
            std::memset(to, 0, static_cast<size_t>(stored.bytes()));
            stored.scale(head, cell) = 0;
        } else if (stored.multipliers == nullptr) {
            stored.scale(head, cell) = round_to_shorts(source, stored.size, factor, reinterpret_cast<int16_t *>(to));
        } else {
            stored.scale(head, cell) = round_to_bytes(source, stored.size, factor, reinterpret_cast<int8_t *>(to),
                                                      stored.multipliers_at(head, cell));
        }
    }
}

void store_keys(const float * source, const Stored & stored, int64_t cell) {
    const float norm = stored.multipliers == nullptr ? kNorm : kNormOf8Bits;
    store(source, stored, cell, [&](const float * x) { return factor_of_key(x, stored.size, norm); });
}

void store_values(const float * source, const Stored & stored, int64_t cell) {
    store(source, stored, cell, [&](const float * x) { return factor_of_value(x, stored.size); });
}

// ---- products of pairs ----

// For every query, the sums over `pairs` of pairs of 16-bit numbers: out[query][column] = sum over p of
// panel[p][column] . queries[query][p]; a column is a position's key, or a component of the values.
template <int queries, int vectors>
inline void multiply_pairs(const int32_t * panel, int64_t width, int64_t pairs, const int16_t * from,
                           int64_t query_stride, int32_t * out, int64_t out_stride) {
    Ints sums[queries][vectors];
    UNROLL
    for (int q = 0; q < queries; q++) {
        UNROLL
        for (int v = 0; v < vectors; v++) {
            sums[q][v] = zero_ints();
        }
    }
    for (int64_t p = 0; p < pairs; p++) {
        Ints columns[vectors];
        UNROLL
        for (int v = 0; v < vectors; v++) {
            columns[v] = load(panel + p * width + v * kLanes);
        }
        UNROLL
        for (int q = 0; q < queries; q++) {
            add_pairs<vectors>(sums[q], columns, from + q * query_stride + 2 * p);
        }
    }
    UNROLL
    for (int q = 0; q < queries; q++) {
        UNROLL
        for (int v = 0; v < vectors; v++) {
            std::memcpy(out + q * out_stride + v * kLanes, &sums[q][v], sizeof(Ints));
        }
    }
}

using PairsFunction = void (*)(const int32_t *, int64_t, int64_t, const int16_t *, int64_t, int32_t *, int64_t);

template <int vectors, int queries = 1> constexpr PairsFunction pairs_function(int64_t wanted) {
    if constexpr (queries == kPairQueries) {
        return multiply_pairs<queries, vectors>;
    } else {
        return wanted == queries ? multiply_pairs<queries, vectors> : pairs_function<vectors, queries + 1>(wanted);
    }
}

// Calls before(tile, tiles) before every tile of queries.
template <class Before>
inline void multiply_all_pairs(const int32_t * panel, int64_t width, int64_t pairs, const int16_t * queries,
                               int64_t count, int64_t query_stride, int32_t * out, int64_t out_stride, Before before) {
    const int64_t tiles = (count + kPairQueries - 1) / kPairQueries;
    for (int64_t tile = 0; tile < tiles; tile++) {
        before(tile, tiles);
        const int64_t first = count * tile / tiles;
        const int64_t n = count * (tile + 1) / tiles - first;
        const int16_t * from = queries + first * query_stride;
        int32_t * to = out + first * out_stride;
        int64_t column = 0;
        for (; column + kPairVectors * kLanes <= width; column += kPairVectors * kLanes) {
            pairs_function<kPairVectors>(n)(panel + column, width, pairs, from, query_stride, to + column, out_stride);
        }
        for (; column < width; column += kLanes) {
            pairs_function<1>(n)(panel + column, width, pairs, from, query_stride, to + column, out_stride);
        }
    }
}

// ---- a thread's memory ----

constexpr int kShorts = 2 * kLanes;  // 16-bit numbers of a register

constexpr int64_t padded(int64_t size) { return (size + kShorts - 1) / kShorts * kShorts; }

// Of one thread, for up to `queries` query heads of up to kMaxRows rows.
struct AttentionScratch {
    AttentionScratch(void * memory, int64_t size, int64_t queries) {
        char * end = static_cast<char *>(memory);
        const auto take = [&end](int64_t bytes) {
            char * begin = end;
            end += (bytes + 63) / 64 * 64;
            return begin;
        };
        const int64_t width = padded(size);
        panel = reinterpret_cast<int32_t *>(take(2 * kBlock * width));
        rows = reinterpret_cast<int16_t *>(take(2 * kBlock * width));
        products = reinterpret_cast<int32_t *>(take(4 * queries * std::max<int64_t>(2 * kBlock, width)));
        scores = reinterpret_cast<float *>(take(4 * queries * kChunk));
        weights = reinterpret_cast<int16_t *>(take(2 * queries * kBlock));
        factors = reinterpret_cast<float *>(take(4 * queries));
        units = reinterpret_cast<int32_t *>(take(4 * queries * kLanes));
        this->queries = reinterpret_cast<int16_t *>(take(2 * queries * width));
        query_scales = reinterpret_cast<float *>(take(2 * 4 * queries));
        bytes = end - static_cast<char *>(memory);
    }

    int32_t * panel;  // keys [pair of components][position], or values [pair of positions][component]
    int16_t * rows;   // copies of keys or values that do not fill registers
    int32_t * products;
    float * scores;
    int16_t * weights;
    float * factors;
    int32_t * units;
    int16_t * queries;
    float * query_scales;  // and those of the components that are multiplied by the rest of keys
    int64_t bytes;
};

int64_t attention_scratch(int64_t size, int64_t queries) { return AttentionScratch(nullptr, size, queries).bytes; }

// ---- the whole ----

void read_queries(const Attention & a, const int32_t * rows, int n_rows, int first_head, int heads, void * memory) {
    const AttentionScratch scratch(memory, a.size, int64_t{n_rows} * heads);
    const int64_t width = padded(a.size);
    for (int row = 0; row < n_rows; row++) {
        for (int head = 0; head < heads; head++) {
            const int64_t query = int64_t{row} * heads + head;
            const auto * from = reinterpret_cast<const float *>(
                a.queries + static_cast<size_t>(rows[row]) * a.query_row_stride +
                static_cast<size_t>(first_head + head) * a.query_stride);
            int16_t * to = scratch.queries + query * width;
            std::memset(to + a.size, 0, static_cast<size_t>(2 * (width - a.size)));
            const auto read = [&](int64_t first, int64_t size, float * query_scale) {
                const float factor = factor_of_key(from + first, size, kNorm);
                const float unit = round_to_shorts(from + first, size, factor, to + first);
                *query_scale = factor == 0 ? 0 : unit * a.scale * kLog2E;
            };
            read(0, a.keys.size, scratch.query_scales + query);
            read(a.keys.size, a.rest.size, scratch.query_scales + int64_t{n_rows} * heads + query);
        }
    }
}

// Where the keys or values of a block's positions lie: zeros where there is no position.
struct Block {
    const int16_t * rows[kBlock];
    float scales[kBlock];

    Block(const Stored & stored, int64_t key_head, const int32_t * cells, int16_t * copies) {
        alignas(64) static constexpr int16_t zeros[kMaxHeadSize] = {};
        static constexpr uint8_t no_multipliers[kMaxHeadSize / kTogether] = {};
        const int64_t width = padded(stored.size);
        for (int i = 0; i < kBlock; i++) {
            const bool is_there = cells[i] >= 0;
            const void * at = is_there ? static_cast<const void *>(stored.at(key_head, cells[i])) : zeros;
            scales[i] = is_there ? stored.scale(key_head, cells[i]) : 0;
            rows[i] = static_cast<const int16_t *>(at);
            int16_t * copy = copies + i * width;
            if (stored.multipliers != nullptr) {
                const uint8_t * multipliers = is_there ? stored.multipliers_at(key_head, cells[i]) : no_multipliers;
                for (int64_t j = 0; j < stored.size; j += kLanes * 2) {
                    const Ints wide = widen_to_shorts(static_cast<const int8_t *>(at) + j, multipliers[j / kTogether]);
                    std::memcpy(copy + j, &wide, sizeof wide);
                }
                rows[i] = copy;
            } else if (width != stored.size) {
                std::memset(copy + stored.size, 0, static_cast<size_t>(2 * (width - stored.size)));
                std::memcpy(copy, at, static_cast<size_t>(2 * stored.size));
                rows[i] = copy;
            }
        }
    }
};

// What a chunk reads, block by block: its keys, its values, and the keys of the chunk that is likely to follow.
struct Reads {
    const Attention & a;
    int64_t key_head;
    const Chunk & chunk;
    int blocks;

    // Asks for a part of a block that is read later: memory answers so many requests at once.
    void prefetch(int block, int64_t part, int64_t parts) const {
        const bool follows = block >= 2 * blocks;
        const Stored & stored = block < blocks || follows ? a.keys : a.values;
        const int32_t * cells = follows ? chunk.next_cells : chunk.cells;
        if (cells == nullptr) {
            return;
        }
        cells += block % blocks * kBlock;
        for (int64_t i = kBlock * part / parts; i < kBlock * (part + 1) / parts; i++) {
            const char * at = stored.at(key_head, std::max(cells[i], 0));
            for (int64_t byte = 0; byte < stored.bytes(); byte += 64) {
                ask_for(at + byte);
            }
        }
    }
};

template <class Function> inline auto when(bool is_so, const Function & function) {
    return [is_so, &function](int64_t part, int64_t parts) {
        if (is_so) {
            function(part, parts);
        }
    };
}

// Keys as a panel [pair of components][position].
template <class Before> inline void turn_keys(const Block & block, int64_t width, int32_t * panel, Before before) {
    for (int first = 0; first < kBlock; first += kLanes) {
        for (int64_t pair = 0; pair < width / 2; pair += kLanes) {
            before(first / kLanes * (width / 2 / kLanes) + pair / kLanes, kBlock / kLanes * (width / 2 / kLanes));
            Ints square[kLanes];
            UNROLL
            for (int i = 0; i < kLanes; i++) {
                square[i] = load(block.rows[first + i] + 2 * pair);
            }
            transpose(square);
            UNROLL
            for (int i = 0; i < kLanes; i++) {
                std::memcpy(panel + (pair + i) * kBlock + first, &square[i], sizeof(Ints));
            }
        }
    }
}

// Values as a panel [pair of positions][component].
template <class Before> inline void pair_values(const Block & block, int64_t width, int32_t * panel, Before before) {
    for (int pair = 0; pair < kWeightPairs; pair++) {
        before(pair, kWeightPairs);
        for (int64_t i = 0; i < width; i += kShorts) {
            Ints low;
            Ints high;
            interleave(load(block.rows[2 * pair] + i), load(block.rows[2 * pair + 1] + i), low, high);
            std::memcpy(panel + pair * width + i, &low, sizeof low);
            std::memcpy(panel + pair * width + i + kLanes, &high, sizeof high);
        }
    }
}

// Scores of a block, minus infinity for what a row does not see; returns nothing but `most`, the largest of each query.
template <bool is_capped, bool has_rest>
inline void score(const AttentionScratch & scratch, const float * scales, const float * scales_of_rest, int64_t queries,
                  int heads, int block, const ChunkRow * rows, float softcap, float * most) {
    for (int64_t q = 0; q < queries; q++) {
        const uint64_t visible = rows[q / heads].visible[block];
        const Floats scale = all(scratch.query_scales[q]);
        Floats largest_yet = all(most[q]);
        UNROLL
        for (int i = 0; i < kBlock; i += kLanes) {
            Ints products;
            std::memcpy(&products, scratch.products + q * kBlock + i, sizeof products);
            Floats x = mul(mul(to_float(products), load_floats(scales + i)), scale);
            if (has_rest) {
                std::memcpy(&products, scratch.products + (queries + q) * kBlock + i, sizeof products);
                x = fma(mul(to_float(products), load_floats(scales_of_rest + i)), all(scratch.query_scales[queries + q]), x);
            }
            const Floats s = where(visible >> i, is_capped ? capped(x, softcap) : x);
            store_floats(scratch.scores + q * kChunk + block * kBlock + i, s);
            largest_yet = max(largest_yet, s);
        }
        most[q] = largest(largest_yet);
    }
}

// Weights of a block's positions as 16-bit numbers, and what one unit of them is worth.
inline void weigh(const AttentionScratch & scratch, const Block & values, int64_t queries, int block,
                  const float * most, int32_t most_weights) {
    for (int64_t q = 0; q < queries; q++) {
        const float * scores = scratch.scores + q * kChunk + block * kBlock;
        Floats weighted[kBlock / kLanes];
        Floats heaviest = zero();
        Ints units = load(scratch.units + q * kLanes);
        UNROLL
        for (int i = 0; i < kBlock / kLanes; i++) {
            const Floats p = exp2_of_negative(sub(load_floats(scores + i * kLanes), all(most[q])));
            const Floats weight = or_zero(p, kLeastWeight);
            units = add_ints(units, to_int(mul(weight, all(kUnit))));
            weighted[i] = mul(weight, load_floats(values.scales + i * kLanes));
            heaviest = max(heaviest, weighted[i]);
        }
        std::memcpy(scratch.units + q * kLanes, &units, sizeof units);
        const float unit = largest(heaviest) / kMaxShort;
        const Floats factor = all(unit > 0 ? 1 / unit : 0);
        Ints rounded[kBlock / kLanes];
        Ints sum = zero_ints();
        UNROLL
        for (int i = 0; i < kBlock / kLanes; i++) {
            rounded[i] = to_int(mul(weighted[i], factor));
            sum = add_ints(sum, rounded[i]);
        }
        int shift = 0;
        for (const int32_t total = sum_of_ints(sum); total > most_weights << shift;) {
            shift++;
        }
        UNROLL
        for (int i = 0; i < kBlock / kLanes; i++) {
            const Ints half = all(shift > 0 ? 1 << (shift - 1) : 0);
            store_shorts(scratch.weights + q * kBlock + i * kLanes, shifted_right(add_ints(rounded[i], half), shift));
        }
        scratch.factors[q] = unit * static_cast<float>(1 << shift);
    }
}

// The rows that read_queries() has read, over the positions of a chunk; for every query head of every row
// results[query] = {largest score, sum of weights, sums of weighted values}. A sum of 0: the row sees nothing of it.
void attend(const Attention & a, int64_t key_head, const Chunk & chunk, int heads, void * memory,
            float * const * results) {
    const int64_t queries = int64_t{chunk.n_rows} * heads;
    const AttentionScratch scratch(memory, a.size, queries);
    const int64_t stride = padded(a.size);
    bool is_seen[kBlocks] = {};
    int last = 0;
    for (int block = 0; block < kBlocks; block++) {
        for (int row = 0; row < chunk.n_rows; row++) {
            is_seen[block] |= chunk.rows[row].visible[block] != 0;
        }
        last = is_seen[block] ? block : last;
    }
    const Reads reads{a, key_head, chunk, last + 1};
    float most[kMaxRows * kMaxHeads];
    std::fill(most, most + queries, -INFINITY);
    for (int block = 0; block <= last; block++) {
        if (!is_seen[block]) {
            continue;
        }
        const int32_t * cells = chunk.cells + block * kBlock;
        const auto prefetch = [&](int64_t part, int64_t parts) { reads.prefetch(block + 1, part, parts); };
        const auto multiply = [&](const Block & keys, int64_t size, const int16_t * from, int32_t * products, bool asks) {
            const int64_t width = padded(size);
            turn_keys(keys, width, scratch.panel, when(asks && queries <= kFewQueries, prefetch));
            multiply_all_pairs(scratch.panel, kBlock, width / 2, from, queries, stride, products, kBlock,
                               when(asks && queries > kFewQueries, prefetch));
        };
        const Block keys(a.keys, key_head, cells, scratch.rows);
        multiply(keys, a.keys.size, scratch.queries, scratch.products, true);
        float scales_of_rest[kBlock];  // set only where there is a rest
        if (a.rest.size > 0) {
            const Block rest(a.rest, key_head, cells, scratch.rows);
            multiply(rest, a.rest.size, scratch.queries + a.keys.size, scratch.products + queries * kBlock, false);
            std::copy(rest.scales, rest.scales + kBlock, scales_of_rest);
        }
        const auto score_keys = a.softcap != 0    ? (a.rest.size > 0 ? score<true, true> : score<true, false>)
                                : a.rest.size > 0 ? score<false, true>
                                                  : score<false, false>;
        score_keys(scratch, keys.scales, scales_of_rest, queries, heads, block, chunk.rows, a.softcap, most);
    }
    for (int64_t q = 0; q < queries; q++) {
        results[q][0] = most[q];
        most[q] = most[q] == -INFINITY ? 0 : most[q];
    }
    std::fill(scratch.units, scratch.units + queries * kLanes, 0);
    const int64_t width = padded(a.values.size);
    const int32_t most_weights = a.values.data == a.keys.data ? kMaxWeights / 2 : kMaxWeights;
    bool is_first = true;
    for (int block = 0; block <= last; block++) {
        if (!is_seen[block]) {
            continue;
        }
        const int32_t * cells = chunk.cells + block * kBlock;
        const Block values(a.values, key_head, cells, scratch.rows);
        weigh(scratch, values, queries, block, most, most_weights);
        const auto prefetch = [&](int64_t part, int64_t parts) { reads.prefetch(last + block + 2, part, parts); };
        pair_values(values, width, scratch.panel, when(queries <= kFewQueries, prefetch));
        multiply_all_pairs(scratch.panel, width, kWeightPairs, scratch.weights, queries, kBlock, scratch.products, width,
                           when(queries > kFewQueries, prefetch));
        for (int64_t q = 0; q < queries; q++) {
            const Floats factor = all(scratch.factors[q]);
            float * sums = results[q] + 2;
            for (int64_t i = 0; i < width; i += kLanes) {
                Ints products;
                std::memcpy(&products, scratch.products + q * width + i, sizeof products);
                const Floats product = to_float(products);
                store_floats(sums + i, is_first ? mul(product, factor) : fma(product, factor, load_floats(sums + i)));
            }
        }
        is_first = false;
    }
    for (int64_t q = 0; is_first && q < queries; q++) {
        std::fill(results[q] + 2, results[q] + 2 + width, 0.0F);
    }
    for (int64_t q = 0; q < queries; q++) {
        results[q][1] = static_cast<float>(sum_of_ints(load(scratch.units + q * kLanes))) * (1 / kUnit);
    }
}

int64_t result_floats(int64_t size) { return 2 + padded(size); }

// Adds a chunk's result to that of the chunks before it.
void merge(float * total, const float * chunk, int64_t size) {
    if (chunk[1] == 0) {
        return;
    }
    if (total[1] == 0) {
        std::copy(chunk, chunk + result_floats(size), total);
        return;
    }
    const float most = std::max(total[0], chunk[0]);
    const float before = exp2_of_negative(total[0] - most);
    const float now = exp2_of_negative(chunk[0] - most);
    total[0] = most;
    total[1] = total[1] * before + chunk[1] * now;
    for (int64_t i = 2; i < result_floats(size); i += kLanes) {
        store_floats(total + i, fma(load_floats(chunk + i), all(now), mul(load_floats(total + i), all(before))));
    }
}

void finish(const float * total, int64_t size, float * out) {
    if (total[1] == 0) {  // no chunk has written the sums of a row that sees nothing
        std::fill(out, out + size, 0.0F);
        return;
    }
    const Floats scale = all(1 / total[1]);
    for (int64_t i = 0; i < size; i += kLanes) {
        store_floats(out + i, mul(load_floats(total + 2 + i), scale));
    }
}

}  // namespace
