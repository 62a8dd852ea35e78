// What the variants (AVX-512 VNNI, AVX-VNNI, AVX2; NEON with i8mm, with dotprod, without) have in common: memory layouts, and the table of functions that each
// variant provides.

#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>

namespace specserve {

struct Kernels;
struct Weights;

constexpr int kMostRows = 16;  // of a tile, in any variant

// Rows of activations, quantised to 8 bits: a tile of up to `max_tile` rows that are multiplied together.
//
// The rows of a tile are interleaved block by block (block 0 of row 0, block 0 of row 1, ...), so that a kernel walks
// all three arrays from front to back.
struct Tile {
    int8_t * values;  // [k / 32][rows][32]
    float * scales;   // [blocks][rows]
    int32_t * sums;   // [blocks][Format::sums][rows]: sums of activations, in the form that the format's kernel wants
    int rows;
};

// A weight format of GGUF files as a variant computes it: see format.h.
struct Format {
    ggml_type type;
    int length;           // weights of a block; every block of activations has a scale
    int sums;             // 32-bit words of a block and row in Tile::sums
    int64_t block_bytes;  // of a panel

    // Pack panels [first, last) of a matrix from GGUF's own layout.
    void (*pack)(const Weights &, const uint8_t * source, int64_t first, int64_t last, uint8_t * destination);

    // Quantise blocks [first, last) of a row of floats into row `row` of a tile.
    void (*quantise)(const float * source, int64_t first, int64_t last, const Tile &, int row);

    // Multiply a tile by a panel: out[row][column].
    void (*multiply)(const Weights &, int64_t panel, const Tile &, float * const * out);
};

// A weight matrix, packed for the kernels: `columns` output features of `k` weights each.
//
// Columns are packed in panels of as many columns as a vector register has 32-bit lanes, so that lane c of every
// register belongs to column c and no sum across lanes is ever needed. A panel is its blocks along k in the order in which
// a product reads them, each the scales and then the quantised weights. The last panel is filled up with zeros.
struct Weights {
    const Kernels * kernels;  // of the variant that has packed them
    const Format * format;
    int64_t k;
    int64_t columns;
    const uint8_t * data;

    int64_t panels() const;
    int64_t panel_bytes() const { return k / format->length * format->block_bytes; }
    int64_t bytes() const { return panels() * panel_bytes(); }

    // The matrix of an expert, where those of a mixture lie one after another.
    Weights of_expert(int64_t number) const { return {kernels, format, k, columns, data + number * bytes()}; }
};

// ---- attention ----

constexpr int kMaxHeads = 16;      // query heads of a key head that are computed together
constexpr int kMaxHeadSize = 576;  // components of a head
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
//
// DeepSeek's latent attention has no values of its own: they are the first components of the keys. The others may be a
// hundred times as large and so have scales of their own, in `rest`, which is empty elsewhere.
struct Attention {
    Stored keys;
    Stored rest;
    Stored values;
    int64_t size;  // of a key with its rest, a multiple of 16
    float scale;
    float softcap;  // of scores; 0: none
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

// ---- variants ----

struct Kernels {
    const char * name;
    int lanes;     // columns of a panel
    int max_tile;  // rows of a tile
    const Format * formats;
    int n_formats;

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

    // Null where there is no kernel for a type.
    const Format * format_of(ggml_type type) const {
        for (const Format * format = formats; format != formats + n_formats; format++) {
            if (format->type == type) {
                return format;
            }
        }
        return nullptr;
    }
};

inline int64_t Weights::panels() const { return (columns + kernels->lanes - 1) / kernels->lanes; }

// Null where this processor does not have the variant, whose name is a flag in /proc/cpuinfo. A library has those of x86-64
// or those of aarch64.
const Kernels * avx512_vnni();
const Kernels * avx_vnni();
const Kernels * avx2();
const Kernels * i8mm();
const Kernels * asimddp();
const Kernels * asimd();

}  // namespace specserve
