// What the variants (AVX-512 VNNI, AVX-VNNI, AVX2) have in common: formats, memory layouts, and the table of functions
// that each variant provides.

#pragma once

#include <cstddef>
#include <cstdint>

namespace specserve {

// The weight formats of GGUF files that have kernels here.
enum class Format : int { q4_0, q8_0, q4_k, q6_k };
constexpr int kFormats = 4;

// How weights are prefetched: by the processor alone, with prefetcht1 or prefetchnta, and so many bytes before they are
// needed.
enum class Hint : int { none, t1, nta };
struct Prefetch {
    Hint hint;
    int64_t ahead;
};
constexpr int kFewRows = 2;  // of a tile: few are limited by memory, more by arithmetic

// A weight matrix, packed for the kernels: `columns` output features of `k` weights each.
//
// Columns are packed in panels of as many columns as a vector register has 32-bit lanes, so that lane c of every
// register belongs to column c and no sum across lanes is ever needed. A panel is its blocks along k in the order in which
// a product reads them, each the scales and then the quantised weights. The last panel is filled up with zeros.
struct Weights {
    Format format;
    int64_t k;
    int64_t columns;
    const uint8_t * data;
    const Prefetch * prefetch;  // for tiles of few rows, and for others: see Library

    const Prefetch & prefetch_for(int rows) const { return prefetch[rows > kFewRows]; }
};

// Rows of activations, quantised to 8 bits: a tile of up to `max_tile` rows that are multiplied together.
//
// The rows of a tile are interleaved block by block (block 0 of row 0, block 0 of row 1, ...), so that a kernel walks
// all three arrays from front to back.
struct Tile {
    int8_t * values;  // [k / 32][rows][32]
    float * scales;   // [blocks][rows]: one a block of 32 (q4_0, q8_0) or of 256 weights (q4_k, q6_k)
    int32_t * sums;   // sums of quantised activations, in the form that the format's kernel wants: see quantise()
    int rows;
};

// ---- attention ----

constexpr int kMaxHeads = 16;      // query heads that share a key head
constexpr int kMaxHeadSize = 256;  // components of a head
constexpr int kMaxRows = 8;        // rows that are attended to together
constexpr int kBlock = 64;         // positions whose products are added as integers
constexpr int kBlocks = 4;         // of a chunk
constexpr int kChunk = kBlocks * kBlock;
constexpr int kTogether = 32;  // components that share a multiplier in the 8-bit cache

// Keys or values of a layer: 16-bit numbers, and what one unit of a head's is worth in each cell. In 8 bits each kTogether
// components have a multiplier, by which they become such numbers.
struct Stored {
    // [head][cell][component]: an attention reads one head, and memory is read faster in long runs.
    char * data;
    float * scales;    // [head][cell]
    uint8_t * multipliers;  // [head][cell][component / kTogether]; null for 16 bits
    int64_t cells;
    int64_t heads;
    int64_t size;

    int64_t bytes() const { return multipliers != nullptr ? size : 2 * size; }
    char * at(int64_t head, int64_t cell) const { return data + (head * cells + cell) * bytes(); }
    float & scale(int64_t head, int64_t cell) const { return scales[head * cells + cell]; }
    uint8_t * multipliers_at(int64_t head, int64_t cell) const {
        return multipliers + (head * cells + cell) * (size / kTogether);
    }
};

// The attention of a graph's operation. Strides are in bytes.
struct Attention {
    Stored keys;
    Stored values;
    int64_t size;  // of a head, a multiple of 16
    float scale;
    const char * queries;
    size_t query_stride;      // from one head to the next
    size_t query_row_stride;  // from one row to the next
};

struct ChunkRow {
    uint64_t visible[kBlocks];  // bit i: the row sees position i of a block
};

// The positions of a chunk, and rows that may see them.
struct Chunk {
    const int32_t * cells;  // where in the cache each lies, -1 where nobody sees it
    const ChunkRow * rows;
    int n_rows;
    const int32_t * next_cells;  // of the chunk that is likely to be read next; null: unknown
};

struct Kernels {
    const char * name;
    int lanes;     // columns of a panel
    int max_tile;  // rows of a tile

    // Bytes of a panel.
    int64_t (*panel_bytes)(Format, int64_t k);

    // Pack panels [first, last) of a matrix from GGUF's own layout.
    void (*pack)(const Weights &, const uint8_t * source, int64_t first, int64_t last, uint8_t * destination);

    // Quantise blocks [first, last) of a row of floats into row `row` of a tile.
    void (*quantise)(Format, const float * source, int64_t first, int64_t last, const Tile &, int row);

    // Multiply a tile by a panel: out[row * stride + column].
    void (*multiply)(const Weights &, int64_t panel, const Tile &, float * out, int64_t stride);

    // Write the keys or values of a token's heads, one after another, into a cell.
    void (*store_keys)(const float * source, const Stored &, int64_t cell);
    void (*store_values)(const float * source, const Stored &, int64_t cell);

    // attention.h: `memory` has attention_scratch() bytes, a result has result_floats() of a head.
    int64_t (*attention_scratch)(int64_t size, int64_t queries);
    int64_t (*result_floats)(int64_t size);
    void (*read_queries)(const Attention &, const int32_t * rows, int n_rows, int first_head, int heads, void * memory);
    void (*attend)(const Attention &, int64_t key_head, const Chunk &, int heads, void * memory, float * const * results);
    void (*merge)(float * total, const float * chunk, int64_t size);
    void (*finish)(const float * total, int64_t size, float * out);
};

// The weights of a block of this format: every block has scales of its own.
constexpr int block_length(Format format) {
    return format == Format::q4_0 || format == Format::q8_0 ? 32 : 256;
}

// 32-bit words a row of `k` activations takes in Tile::scales and in Tile::sums.
constexpr int64_t scale_words(Format format, int64_t k) { return k / block_length(format); }

constexpr int64_t sum_words(Format format, int64_t k) {
    switch (format) {
        case Format::q4_0:
        case Format::q8_0: return k / 32;
        case Format::q4_k: return k / 64;  // sums of 32, two in a word
        case Format::q6_k: return k / 16;
    }
    return 0;
}

// Null where this build or this processor does not have the variant.
const Kernels * avx512_vnni();
const Kernels * avx_vnni();
const Kernels * avx2();

}  // namespace specserve
