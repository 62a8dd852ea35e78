// The state that the buffer type, the operations of a graph and the functions called from Python share.

#pragma once

#include <atomic>

#include "ggml_internals.h"
#include "kernels.h"

namespace specserve {

class Cache;

struct Library {
    const Kernels * kernels = nullptr;  // the variant in use
    unsigned formats = 0;               // bit n: weights of its format n that are loaded from now on are taken
    std::atomic<int64_t> products{0};   // calls of compute_forward, counted by thread 0
    std::atomic<int64_t> attentions{0};
    std::atomic<int64_t> left{0};  // kinds of operations that were left to ggml
    std::atomic<int64_t> growth{0};  // bytes that loaded weights take beyond those in their files
    Cache * cache = nullptr;  // of the context that computes; null: llama.cpp's own attention
    const int32_t * head_groups = nullptr;  // groups of columns of the head that passes compute; null: all
    int64_t head_count = 0;
};

// Bits of Library::left: operations whose results depend on the number of rows; and from kLeftFormat on ggml's types of
// weights whose results do not, but which have no kernel.
constexpr int64_t kLeftProduct = 1;
constexpr int64_t kLeftAttention = 2;
constexpr int64_t kLeftFormat = 4;
constexpr int64_t kHeadGroup = 16;  // columns of a group: one or two panels

Library & library();

ggml_backend_buffer_type_t buffer_type();

// A product by way of a ggml graph, as in a forward pass: by these kernels through the buffer type, or by ggml's own.
struct ProductCase {
    bool ours;
    const Format * format;
    int64_t k, columns, rows;
    const uint8_t * weights;  // in GGUF's layout
    int pieces;               // in which they are written
    const float * x;          // [rows][k]
    // Of a mixture, whose weights are [experts][columns][k]: numbers of experts [rows][used], and `inputs`, 1 or `used`,
    // rows of x for each of them. Else null and ones.
    const int32_t * chosen;
    int64_t experts, used, inputs;
};

// Writes [rows][used][columns]; returns the seconds of the fastest of some repetitions, infinite ones if it failed or did not
// come to these kernels.
double run_product(const ProductCase &, int threads, int repeats, float * out);

// Attention by way of a ggml graph: keys and values [cells][key_heads][size or value_size] are written at some positions,
// queries [heads][rows][size], mask [rows][cells], out [rows][heads][value_size].
struct AttentionCase {
    int64_t size, value_size, cells, key_heads, heads, rows;
    float scale, softcap;
    const float * queries;
    const float * keys;
    const float * values;  // null: the first components of the keys
    const int32_t * positions;  // of cells
    const uint16_t * mask;      // half precision
    const float * sinks;        // [heads]; null: none
    bool is_8_bit;              // the cache
};

// Returns whether it came to these kernels.
bool run_attention(const AttentionCase &, int threads, float * out);

}  // namespace specserve
