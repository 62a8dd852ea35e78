// What a graph does with the KV cache: rows are written into it, and attention reads it.
//
// Few rows are divided by chunks of positions, whose results are merged afterwards, many rows by rows; either way in
// pieces that threads take in turn, so that one which a neighbour holds up delays nobody. The results are the same.

#include <algorithm>
#include <array>
#include <cstring>
#include <numbers>

#include "cache.h"
#include "graph.h"

namespace specserve {

namespace {

// Pieces a thread has at least where work is divided by rows; with fewer it is divided by chunks.
constexpr int64_t kPiecesPerThread = 8;
// Bytes of results before they are merged; where chunks have more, work is divided by rows.
constexpr int64_t kMaxResults = 64 << 20;

char * at(const ggml_tensor * t, int64_t i1, int64_t i2) {
    return static_cast<char *>(t->data) + static_cast<size_t>(i1) * t->nb[1] + static_cast<size_t>(i2) * t->nb[2];
}

// An attention of a graph, as it is computed by some threads.
class Work {
  public:
    Work(Cache & cache, Read & read, const ggml_tensor * op, int threads)
        : cache_(cache), read_(read), op_(op), kernels_(*library().kernels), plan_(*read.plan) {
        const ggml_tensor * q = op->src[0];
        std::memcpy(&attention_.scale, op->op_params, sizeof attention_.scale);
        std::memcpy(&attention_.softcap, op->op_params + 2, sizeof attention_.softcap);
        sinks_ = op->src[4] == nullptr ? nullptr : static_cast<const float *>(op->src[4]->data);
        attention_.size = q->ne[0];
        attention_.queries = static_cast<const char *>(q->data);
        attention_.query_stride = q->nb[2];
        attention_.query_row_stride = q->nb[1];
        attention_.keys = read.layer->keys.stored;
        attention_.rest = read.layer->rest.stored;
        attention_.values = read.layer->values.stored;
        heads_ = q->ne[2];
        key_heads_ = read.layer->keys.stored.heads;
        floats_ = kernels_.result_floats(attention_.values.size);
        tiles_ = (plan_.rows() + kMaxRows - 1) / kMaxRows;
        const int64_t whole = key_heads_ * (read.by_chunks ? static_cast<int64_t>(plan_.units().size()) : tiles_);
        // Where there are fewer pieces than threads, the query heads of one key head are divided; and where they are many.
        parts_ = std::max((shared() + kMaxHeads - 1) / kMaxHeads, std::min(threads / whole, shared()));
        pieces_ = whole * parts_;
    }

    // To be called while the pass is planned.
    void divide(int threads) {
        const int64_t bytes = plan_.rows() * heads_ * plan_.chunks() * floats_ * static_cast<int64_t>(sizeof(float));
        read_.by_chunks = tiles_ * key_heads_ < kPiecesPerThread * threads && bytes <= kMaxResults;
        if (read_.by_chunks) {
            cache_.results.resize(std::max(cache_.results.size(), static_cast<size_t>(bytes) / sizeof(float)));
        }
    }

    int64_t scratch() const {
        const int64_t queries = most_queries();
        const int64_t bytes = kernels_.attention_scratch(attention_.size, queries) +
                              2 * queries * floats_ * static_cast<int64_t>(sizeof(float));
        return (bytes + static_cast<int64_t>(kAlignment) - 1) / static_cast<int64_t>(kAlignment) *
               static_cast<int64_t>(kAlignment);
    }

    void compute(ggml_compute_params * params) {
        uint8_t * memory = aligned(params->wdata) + params->ith * scratch();
        const auto take = [](std::atomic<int64_t> & pieces) { return pieces.fetch_add(1, std::memory_order_relaxed); };
        for (int64_t piece = take(read_.pieces); piece < pieces_; piece = take(read_.pieces)) {
            const int64_t part = piece % parts_;
            const int64_t key_head = piece / parts_ % key_heads_;
            const int64_t number = piece / parts_ / key_heads_;
            const int first = static_cast<int>(shared() * part / parts_);
            const int heads = static_cast<int>(shared() * (part + 1) / parts_) - first;
            if (read_.by_chunks) {
                attend_to_chunk(plan_.units()[static_cast<size_t>(number)], key_head, first, heads, memory);
            } else {
                attend_to_all(plan_.rows() * number / tiles_, plan_.rows() * (number + 1) / tiles_, key_head, first,
                              heads, memory);
            }
        }
        if (!read_.by_chunks || plan_.chunks() == 1) {
            return;
        }
        ggml_barrier(params->threadpool);
        for (int64_t piece = take(read_.merged_pieces); piece < plan_.rows() * heads_;
             piece = take(read_.merged_pieces)) {
            merge(piece / heads_, piece % heads_);
        }
    }

  private:
    static constexpr size_t kMaxQueries = kMaxRows * kMaxHeads;
    using Results = std::array<float *, kMaxQueries>;

    int64_t shared() const { return heads_ / key_heads_; }
    int64_t most_queries() const { return kMaxRows * std::min<int64_t>(shared(), kMaxHeads); }

    float * out(int64_t row, int64_t head) const { return reinterpret_cast<float *>(at(op_, head, row)); }

    float * result(int64_t row, int64_t head, int64_t chunk) const {
        return cache_.results.data() + ((row * heads_ + head) * plan_.chunks() + chunk) * floats_;
    }

    void attend_to_chunk(const Plan::Unit & unit, int64_t key_head, int first, int heads, void * memory) const {
        const Plan::Group & group = *unit.group;
        const int32_t * rows = group.rows.data() + unit.first;
        const auto head = static_cast<int>(key_head * shared()) + first;
        Results results;
        for (int row = 0; row < unit.n_rows; row++) {
            for (int i = 0; i < heads; i++) {
                results[static_cast<size_t>(row * heads + i)] = result(rows[row], head + i, group.chunk);
            }
        }
        kernels_.read_queries(attention_, rows, unit.n_rows, head, heads, memory);
        const Plan::Unit * next = &unit == &plan_.units().back() ? nullptr : &unit + 1;
        const Chunk chunk{group.cells, group.visible.data() + unit.first, unit.n_rows,
                          next == nullptr ? nullptr : next->group->cells};
        kernels_.attend(attention_, key_head, chunk, heads, memory, results.data());
        for (int q = 0; plan_.chunks() == 1 && q < unit.n_rows * heads; q++) {
            finish(results[static_cast<size_t>(q)], rows[q / heads], head + q % heads);
        }
    }

    // A sink (gpt-oss) is a position's score without a value: the last that is added, however rows are divided.
    void finish(float * total, int64_t row, int64_t head) const {
        if (sinks_ != nullptr) {
            const float sink[2 + kMaxHeadSize] = {sinks_[head] * std::numbers::log2e_v<float>, 1};
            kernels_.merge(total, sink, attention_.values.size);
        }
        kernels_.finish(total, attention_.values.size, out(row, head));
    }

    void merge(int64_t row, int64_t head) const {
        int64_t chunk = 0;
        while (!plan_.sees(row, chunk)) {
            chunk++;
        }
        float * total = result(row, head, chunk);
        for (chunk++; chunk < plan_.chunks(); chunk++) {
            if (plan_.sees(row, chunk)) {
                kernels_.merge(total, result(row, head, chunk), attention_.values.size);
            }
        }
        finish(total, row, head);
    }

    void attend_to_all(int64_t begin, int64_t end, int64_t key_head, int first, int heads, uint8_t * memory) const {
        const auto n_rows = static_cast<int>(end - begin);
        const auto head = static_cast<int>(key_head * shared()) + first;
        const int queries = n_rows * heads;
        int32_t rows[kMaxRows];
        for (int row = 0; row < n_rows; row++) {
            rows[row] = static_cast<int32_t>(begin) + row;
        }
        auto * totals =
            reinterpret_cast<float *>(memory + kernels_.attention_scratch(attention_.size, most_queries()));
        Results results;
        for (int q = 0; q < queries; q++) {
            totals[q * floats_ + 1] = 0;
            results[static_cast<size_t>(q)] = totals + (queries + q) * floats_;
        }
        kernels_.read_queries(attention_, rows, n_rows, head, heads, memory);
        for (int64_t chunk = 0; chunk < plan_.chunks(); chunk++) {
            for (const Plan::Group * group : plan_.groups(chunk)) {
                ChunkRow visible[kMaxRows] = {};
                bool any = false;
                for (auto it = std::lower_bound(group->rows.begin(), group->rows.end(), rows[0]);
                     it != group->rows.end() && *it < end; ++it) {
                    visible[*it - begin] = group->visible[static_cast<size_t>(it - group->rows.begin())];
                    any = true;
                }
                if (any) {
                    kernels_.attend(attention_, key_head,
                                    {group->cells, visible, n_rows, plan_.first_cells(chunk + 1)}, heads, memory,
                                    results.data());
                    for (int q = 0; q < queries; q++) {
                        kernels_.merge(totals + q * floats_, results[static_cast<size_t>(q)], attention_.values.size);
                    }
                }
            }
        }
        for (int q = 0; q < queries; q++) {
            finish(totals + q * floats_, begin + q / heads, head + q % heads);
        }
    }

    Cache & cache_;
    Read & read_;
    const ggml_tensor * op_;
    const Kernels & kernels_;
    const Plan & plan_;
    Attention attention_{};
    const float * sinks_;  // [head]; null: none
    int64_t heads_;
    int64_t key_heads_;
    int64_t floats_;
    int64_t tiles_;
    int64_t parts_;
    int64_t pieces_;
};

class SharedAttention : public ggml::cpu::tensor_traits {
    bool work_size(int threads, const ggml_tensor * op, size_t & size) override {
        Cache & cache = *library().cache;
        Read & read = cache.plan_attention(op);
        if (cache.loads()) {
            return false;
        }
        Work work(cache, read, op, threads);
        work.divide(threads);
        size = kAlignment + static_cast<size_t>(threads * work.scratch());
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        Cache & cache = *library().cache;
        if (cache.loads()) {
            return true;
        }
        if (params->ith == 0) {
            library().attentions.fetch_add(1, std::memory_order_relaxed);
        }
        Work(cache, cache.read(op), op, params->nth).compute(params);
        return true;
    }
};

class CacheWrite : public ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor * op, size_t &) override {
        library().cache->plan_write(op);
        return false;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        return library().cache->write(op, params->ith, params->nth);
    }
};

class Nothing : public ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; }
    bool compute_forward(ggml_compute_params *, ggml_tensor *) override { return true; }
};

}  // namespace

// What attention.h can do: one cache of all sequences, without what few models have.
bool attends(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0];
    const ggml_tensor * k = op->src[1];
    const ggml_tensor * v = op->src[2];
    const ggml_tensor * mask = op->src[3];
    float max_bias;
    std::memcpy(&max_bias, op->op_params + 1, sizeof max_bias);
    const auto fits = [](const ggml_tensor * t) {
        return (t->type == GGML_TYPE_F16 && t->ne[0] % 16 == 0) || (t->type == GGML_TYPE_Q8_0 && t->ne[0] % kTogether == 0);
    };
    // Values of their own, or the first components of the keys of a single head.
    const bool fits_keys = k->view_src != v->view_src || (k->data == v->data && k->ne[2] == 1 && v->ne[0] % kTogether == 0);
    return library().cache != nullptr && q->type == GGML_TYPE_F32 && fits(k) && fits(v) && mask != nullptr &&
           mask->type == GGML_TYPE_F16 && mask->ne[2] == 1 && max_bias == 0 && q->ne[3] == 1 &&
           k->ne[3] == 1 && v->ne[0] <= k->ne[0] && k->ne[0] <= kMaxHeadSize &&
           k->view_src != nullptr && v->view_src != nullptr && fits_keys && q->nb[0] == 4 && q->ne[2] % k->ne[2] == 0;
}

ggml::cpu::tensor_traits & attention() {
    static SharedAttention it;
    return it;
}

ggml::cpu::tensor_traits & cache_write() {
    static CacheWrite it;
    return it;
}

ggml::cpu::tensor_traits & nothing() {
    static Nothing it;
    return it;
}

}  // namespace specserve
