// A matrix product of a graph: rows are quantised, and threads take pieces of it.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>

#include "assistants.h"
#include "graph.h"

namespace specserve {

namespace {

constexpr int64_t kPiece = 128 << 10;          // bytes of weights a thread takes at a time: some microseconds of reading
constexpr int64_t kPieceOfPrompt = 256 << 10;  // with several tiles, weights that stay in the second-level cache

// Hands out pieces of work. Every thread has a stretch of its own and reads it from front to back, for memory is read
// faster in long runs (a pass of one row takes 37 ms so, and 40 to 50 where threads take turns piece by piece); a thread
// that is done helps the others, since a neighbour on this machine may have slowed them.
class Pieces {
  public:
    Pieces(void * memory, int64_t pieces, int threads)
        : next_(static_cast<Counter *>(memory)), pieces_(pieces), threads_(threads) {}

    static size_t bytes(int threads) { return static_cast<size_t>(threads) * sizeof(Counter); }

    // To be called by every thread, before a barrier.
    void begin(int thread) const { new (next_ + thread) Counter{pieces_ * thread / threads_}; }

    // The next piece for a thread; -1 when all are taken.
    int64_t take(int thread) const {
        for (int i = 0; i < threads_; i++) {
            const int owner = (thread + i) % threads_;
            const int64_t end = pieces_ * (owner + 1) / threads_;
            if (next_[owner].value.load(std::memory_order_relaxed) < end) {
                const int64_t piece = next_[owner].value.fetch_add(1, std::memory_order_relaxed);
                if (piece < end) {
                    return piece;
                }
            }
        }
        return -1;
    }

  private:
    struct alignas(kAlignment) Counter {
        std::atomic<int64_t> value;
    };

    Counter * next_;
    int64_t pieces_;
    int threads_;
};

// Which panels of a product are computed: all, or of the head some groups of columns (specserve_compute_head).
class Columns {
  public:
    Columns(const ggml_tensor * op, const Weights & w) : panels_(w.panels()), lanes_(w.kernels->lanes) {
        if (library().head_groups != nullptr && std::strcmp(op->name, "result_output") == 0) {
            groups_ = library().head_groups;
            panels_ = library().head_count * kHeadGroup / lanes_;
            while (panel(panels_ - 1) >= w.panels()) {
                panels_--;  // the last group may be cut short
            }
        }
    }

    int64_t panels() const { return panels_; }
    bool are_all() const { return groups_ == nullptr; }

    int64_t panel(int64_t i) const {
        const int64_t column = i * lanes_;
        return groups_ == nullptr ? i : (groups_[column / kHeadGroup] * kHeadGroup + column % kHeadGroup) / lanes_;
    }

    // One thread's share of the columns that are not computed, to be done before a barrier.
    void clear(const ggml_tensor * op, int thread, int threads) const {
        if (groups_ != nullptr) {
            const int64_t size = ggml_nelements(op);
            auto * out = static_cast<float *>(op->data);
            std::fill(out + size * thread / threads, out + size * (thread + 1) / threads, -INFINITY);
        }
    }

  private:
    const int32_t * groups_ = nullptr;
    int64_t panels_;
    int64_t lanes_;
};

char * row_of(const ggml_tensor * t, int64_t row) {
    const int64_t i1 = row % t->ne[1];
    const int64_t i2 = row / t->ne[1] % t->ne[2];
    const int64_t i3 = row / t->ne[1] / t->ne[2];
    return static_cast<char *>(t->data) + static_cast<size_t>(i1) * t->nb[1] + static_cast<size_t>(i2) * t->nb[2] +
           static_cast<size_t>(i3) * t->nb[3];
}

class Product : public ggml::cpu::tensor_traits {
    bool work_size(int threads, const ggml_tensor * op, size_t & size) override {
        const Weights weights = described(op->src[0]);
        const Activations activations(weights, ggml_nrows(op->src[1]), nullptr);
        size = kAlignment + Pieces::bytes(threads) + static_cast<size_t>(activations.bytes());
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        if (params->ith == 0) {
            library().products.fetch_add(1, std::memory_order_relaxed);
        }
        const ggml_tensor * x = op->src[1];
        const Weights weights = described(op->src[0]);
        const Columns columns(op, weights);
        const int64_t panels = columns.panels();
        Assistants & assistants = Assistants::all();
        const bool is_assisted = params->nth == 1 && assistants.any() && columns.are_all();
        auto * scratch = aligned(params->wdata);
        Activations activations(weights, ggml_nrows(x), scratch + Pieces::bytes(params->nth));
        if (is_assisted) {
            activations = Activations(weights, ggml_nrows(x), assistants.memory(activations.bytes()));
        }
        const int64_t piece =
            std::clamp<int64_t>((activations.tiles() > 1 ? kPieceOfPrompt : kPiece) / weights.panel_bytes(), 1,
                                std::max<int64_t>(1, panels / (4 * params->nth)));
        const auto source = [&](int64_t row) { return reinterpret_cast<const float *>(row_of(x, row)); };
        activations.quantise(source, params->ith, params->nth);
        // The rows of a result lie one after another, also those of several sequences.
        auto * out = reinterpret_cast<float *>(row_of(op, 0));
        if (is_assisted) {
            assistants.compute({activations, piece, out});
            return true;
        }
        const Pieces pieces(scratch, (panels + piece - 1) / piece, params->nth);
        columns.clear(op, params->ith, params->nth);
        pieces.begin(params->ith);
        ggml_barrier(params->threadpool);

        for (int64_t p = pieces.take(params->ith); p >= 0; p = pieces.take(params->ith)) {
            activations.multiply(p * piece, std::min(panels, (p + 1) * piece),
                                 [&](int64_t i) { return columns.panel(i); }, out, op->ne[0]);
        }
        return true;
    }

};

// Any format that ggml has a dot product of, of one row and one column: slow, but a row's result is the same in any
// company, which that of ggml's own products is not: they have other kernels for several rows.
class PlainProduct : public ggml::cpu::tensor_traits {
    static size_t row_bytes(const ggml_tensor * op) {
        return ggml_row_size(ggml_get_type_traits_cpu(op->src[0]->type)->vec_dot_type, op->src[0]->ne[0]);
    }

    bool work_size(int threads, const ggml_tensor * op, size_t & size) override {
        size = kAlignment + Pieces::bytes(threads) + static_cast<size_t>(ggml_nrows(op->src[1])) * row_bytes(op);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const ggml_tensor * weights = op->src[0];
        const ggml_tensor * x = op->src[1];
        if (params->ith == 0) {
            library().products.fetch_add(1, std::memory_order_relaxed);
            library().left.fetch_or(kLeftFormat << weights->type, std::memory_order_relaxed);
        }
        const ggml_type_traits_cpu & traits = *ggml_get_type_traits_cpu(weights->type);
        const auto k = weights->ne[0];
        const size_t bytes = row_bytes(op);
        auto * scratch = aligned(params->wdata);
        uint8_t * rows = scratch + Pieces::bytes(params->nth);
        for (int64_t row = params->ith; row < ggml_nrows(x); row += params->nth) {
            const auto * from = reinterpret_cast<const float *>(row_of(x, row));
            uint8_t * to = rows + static_cast<size_t>(row) * bytes;
            ggml_get_type_traits_cpu(traits.vec_dot_type)->from_float(from, to, k);
        }
        const int64_t columns = weights->ne[1];
        const int64_t piece = std::clamp<int64_t>(kPiece / static_cast<int64_t>(weights->nb[1]), 1, columns);
        const Pieces pieces(scratch, (columns + piece - 1) / piece, params->nth);
        pieces.begin(params->ith);
        ggml_barrier(params->threadpool);

        auto * out = reinterpret_cast<float *>(row_of(op, 0));
        for (int64_t p = pieces.take(params->ith); p >= 0; p = pieces.take(params->ith)) {
            for (int64_t column = p * piece; column < std::min(columns, (p + 1) * piece); column++) {
                for (int64_t row = 0; row < ggml_nrows(x); row++) {
                    traits.vec_dot(static_cast<int>(k), out + row * columns + column, 0, row_of(weights, column), 0,
                                   rows + static_cast<size_t>(row) * bytes, 0, 1);
                }
            }
        }
        return true;
    }
};

}  // namespace

ggml::cpu::tensor_traits & product() {
    static Product it;
    return it;
}

ggml::cpu::tensor_traits & plain_product() {
    static PlainProduct it;
    return it;
}

}  // namespace specserve
