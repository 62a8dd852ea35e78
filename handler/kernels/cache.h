// The KV cache of a llama.cpp context as our attention keeps it: 16-bit numbers in the memory of llama.cpp's half
// precision tensors, and beside it their scales and the position of every cell.
//
// llama.cpp's graph writes a pass's keys and values by GGML_OP_SET_ROWS, and reads them by GGML_OP_FLASH_ATTN_EXT. Both
// come to graph_attention.cpp while a cache is the current one. Before ggml computes a graph it asks every operation in
// turn, in one thread, how much scratch memory it wants: that is when layers are found, and when the pass is planned.

#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "attention_plan.h"
#include "graph.h"

namespace specserve {

// A layer's keys or values.
struct Side {
    Stored stored{};
    bool are_keys;
    std::vector<float> scales;
    std::vector<uint8_t> multipliers;
    int64_t offset;  // in a saved cell
    int64_t first;   // component of what is written

    int64_t cell_bytes() const;  // with its scales and multipliers
};

struct Layer {
    Side keys;
    Side rest;    // of keys whose first components are the values
    Side values;  // theirs are those of the keys
    std::vector<int32_t> positions;  // of cells
};

// A pass's attention to a layer's keys and values, which layers after it may read as well (Gemma 3n and 4).
struct Read {
    Layer * layer = nullptr;
    const Plan * plan = nullptr;
    bool by_chunks = false;                // how the pass is divided: see graph_attention.cpp
    std::atomic<int64_t> pieces{0};        // of each part of that work, how many are taken
    std::atomic<int64_t> merged_pieces{0};
};

class Cache {
  public:
    // The next pass writes rows at these positions, which must outlive it. With `saved` their keys and values are copied
    // from there, and nothing is computed.
    void begin_pass(const int32_t * positions, int64_t rows, const uint8_t * saved);

    bool loads() const { return saved_ != nullptr; }
    int64_t rows() const { return rows_; }  // of the pass

    // While a pass is planned, for each of its operations in turn.
    void plan_write(const ggml_tensor * op);
    Read & plan_attention(const ggml_tensor * op);

    Read & read(const ggml_tensor * attention) { return reads_.at(attention); }

    // A thread's share of the rows that a pass writes; false where our attention does not read what is written.
    bool write(const ggml_tensor * op, int thread, int threads);

    // The cells of the last pass's rows.
    const std::vector<int32_t> & cells() const { return cells_; }

    // Bytes of a cell in all layers, with its scales; 0 where layers use different cells for a token.
    int64_t cell_bytes() const { return same_cells_ ? cell_bytes_ : 0; }

    // Copies cells, one after another.
    void save(const int32_t * cells, int64_t count, uint8_t * to) const;

    std::vector<float> results{};  // of a layer's chunks, before they are merged

  private:
    void add_side(const ggml_tensor * tensor, Side &, bool are_keys, int64_t first, int64_t size);
    void write(const ggml_tensor * op, Side &, int thread, int threads);

    std::map<const void *, Layer> layers_{};  // by their keys
    std::map<const ggml_tensor *, Read> reads_{};  // of this pass
    std::multimap<const void *, Side *> sides_{};
    std::map<const void *, const ggml_tensor *> writes_{};      // of this pass, by where they go
    std::map<const void *, std::pair<int64_t, Plan>> plans_{};  // by mask: of which pass
    std::vector<int32_t> cells_{};
    int64_t cell_bytes_ = 0;
    bool same_cells_ = true;
    const int32_t * positions_ = nullptr;
    int64_t rows_ = 0;
    const uint8_t * saved_ = nullptr;
    int64_t pass_ = 0;
};

}  // namespace specserve
