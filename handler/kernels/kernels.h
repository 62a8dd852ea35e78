// What the variants (AVX-512 VNNI, AVX-VNNI, AVX2) have in common: formats, memory layouts, and the table of functions
// that each variant provides.

#pragma once

#include <cstddef>
#include <cstdint>

namespace specserve {

// The weight formats of GGUF files that have kernels here.
enum class Format : int { q4_0, q8_0, q4_k, q6_k };
constexpr int kFormats = 4;

// A weight matrix, packed for the kernels: `columns` output features of `k` weights each.
//
// Columns are packed in panels of as many columns as a vector register has 32-bit lanes, so that lane c of every
// register belongs to column c and no sum across lanes is ever needed. A panel is its quantised weights, block after
// block along k, and then the scales of all its blocks. The last panel is filled up with zeros.
struct Weights {
    Format format;
    int64_t k;
    int64_t columns;
    const uint8_t * data;
    bool non_temporal;  // how they are prefetched: see Library
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

constexpr int kMaxHeads = 16;  // query heads that share a key head
constexpr int kMaxRows = 4;    // rows that are attended to together

// Attention of some rows over the cells of one key head, for all the query heads that share it. Strides are in bytes.
struct Attention {
    int64_t cells;  // of the cache; keys and values have half precision, the rest is float
    int64_t size;   // of a head, a multiple of 16
    int heads;      // query heads
    float scale;
    const char * queries;
    size_t query_stride;      // from one head to the next
    size_t query_row_stride;  // from one row to the next
    const char * keys;
    size_t key_stride;  // from one cell to the next
    const char * values;
    size_t value_stride;
    char * out;
    size_t out_stride;
    size_t out_row_stride;
    int64_t mask_stride;  // half precision numbers from one row to the next
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

    // `mask` has a half precision number for every row and cell, 0 or minus infinity.
    void (*attend)(const Attention &, const uint16_t * mask, int rows, void * scratch);
    int64_t (*attention_scratch)(int64_t cells, int64_t heads, int64_t size);  // bytes
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
