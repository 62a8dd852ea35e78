// The state that the buffer type, the checks and the functions called from Python share.

#pragma once

#include <atomic>

#include "ggml_internals.h"
#include "kernels.h"

namespace specserve {

class Cache;

struct Library {
    const Kernels * kernels = nullptr;  // the variant in use
    unsigned formats = 0;               // bit n: weights of format n that are loaded from now on are taken
    // Of tiles of few rows, and of others; timed at load. A pass streams a gigabyte, which seems to evict the kernels'
    // code from the second-level cache, and so from the first: on Zen 5, passes of some numbers of rows took up to 1.4
    // times as long with prefetcht1, by where the library's pages lay in memory. With prefetchnta none did.
    Prefetch prefetch[2] = {{Hint::none, 0}, {Hint::t1, 24 << 10}};
    std::atomic<int64_t> products{0};   // calls of compute_forward, counted by thread 0
    std::atomic<int64_t> attentions{0};
    std::atomic<int> left{0};  // kinds of operations that were left to ggml
    Cache * cache = nullptr;  // of the context that computes; null: llama.cpp's own attention
    const int32_t * head_groups = nullptr;  // groups of columns of the head that passes compute; null: all
    int64_t head_count = 0;
};

constexpr int kLeftProduct = 1;  // bits of Library::left
constexpr int kLeftAttention = 2;
constexpr int64_t kHeadGroup = 16;  // columns of a group: one or two panels

Library & library();

// The format of a ggml type; -1 where there is none here.
int format_of(ggml_type type);
ggml_type type_of(Format format);

ggml_backend_buffer_type_t buffer_type();

// The largest difference from a product in double precision of dequantised weights and exact activations, over some
// rows and columns of pseudorandom blocks, in parts of the root mean square of the products. It is computed as in a
// forward pass, by way of a ggml graph and the buffer type; infinite if the graph did not come to these kernels.
double check_product(Format, int rows, int threads);

// The same of attention, for pseudorandom queries, keys and values, and cells that some rows may not see.
double check_attention(int rows, int threads);

// Attention by way of a ggml graph: keys and values [cells][key_heads][size] are written at some positions, queries
// [heads][rows][size], mask [rows][cells], out [rows][heads][size]. Returns whether it came to our kernels.
struct AttentionCase {
    int64_t size, cells, key_heads, heads, rows;
    float scale;
    const float * queries;
    const float * keys;
    const float * values;
    const int32_t * positions;  // of cells
    const uint16_t * mask;      // half precision
    bool is_8_bit;              // the cache
};
bool run_attention(const AttentionCase &, int threads, float * out);

// A product by way of a ggml graph, through the buffer type, by these kernels or by ggml's own: weights in GGUF's
// layout, which are written in some pieces, x [rows][k], out [rows][columns] (or null). Returns the seconds of the
// fastest of some repetitions.
double run_product(bool ours, Format, int64_t k, int64_t columns, const uint8_t * source, int pieces, int rows,
                   const float * x, int threads, int repeats, float * out);

// The same for pseudorandom numbers; `columns` is a multiple of 16.
double time_product(bool ours, Format, int64_t k, int64_t columns, int rows, int threads, int repeats);

// The seconds of such a product by these kernels with each of some ways to prefetch, in turns: seconds[turn][way].
void time_prefetch(Format, int64_t k, int64_t columns, int rows, int threads, int turns, const Prefetch * ways, int count,
                   double * seconds);

}  // namespace specserve
