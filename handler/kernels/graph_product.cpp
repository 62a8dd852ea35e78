// A matrix product of a graph: rows are quantised, and threads take pieces of it.
//
// In a mixture of experts (MUL_MAT_ID) a weight has a matrix for each expert, and a router has chosen some for each token.
// The rows of one matrix are multiplied together, so that it is read once, and as if there were no others.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

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

// Which expert computes each row of a result, and of which row of activations: a token has one for all its experts, or one
// for each. Without a router the experts are the matrices along the third dimension, mostly one.
class Routing {
  public:
    struct Group {
        int64_t expert;
        int64_t first;  // in order()
        int64_t rows = 0;
    };

    // One of the calling thread's own, until it asks for the next one.
    static const Routing & of(const ggml_tensor * op) {
        thread_local Routing it;
        it.read(op);
        return it;
    }

    const std::vector<Group> & groups() const { return groups_; }  // with rows
    const std::vector<int64_t> & order() const { return order_; }  // the results of a group one after another
    const Group & group_of(int64_t result) const { return all_[expert_of(result)]; }
    int64_t place(int64_t result) const { return places_[static_cast<size_t>(result)]; }  // in its group
    int64_t most_rows() const { return most_rows_; }  // of a group

    int64_t uses() const { return op_->ne[1] / op_->src[1]->ne[1]; }
    int64_t result_of(int64_t input, int64_t use) const {
        const int64_t inputs = op_->src[1]->ne[1];
        return input / inputs * op_->ne[1] + input % inputs + use * inputs;
    }
    int64_t input_of(int64_t result) const {
        const int64_t inputs = op_->src[1]->ne[1];
        return result / op_->ne[1] * inputs + result % op_->ne[1] % inputs;
    }

  private:
    void read(const ggml_tensor * op) {
        op_ = op;
        order_.resize(static_cast<size_t>(ggml_nrows(op)));
        places_.resize(order_.size());
        all_.clear();
        for (int64_t expert = 0; expert < op->src[0]->ne[2]; expert++) {
            all_.push_back({expert, 0});
        }
        for (size_t result = 0; result < order_.size(); result++) {
            places_[result] = all_[expert_of(static_cast<int64_t>(result))].rows++;
        }
        groups_.clear();
        most_rows_ = 0;
        int64_t first = 0;
        for (Group & group : all_) {
            group.first = first;
            first += group.rows;
            most_rows_ = std::max(most_rows_, group.rows);
            if (group.rows > 0) {
                groups_.push_back(group);
            }
        }
        for (size_t i = 0; i < order_.size(); i++) {
            const auto result = static_cast<int64_t>(i);
            order_[static_cast<size_t>(group_of(result).first + places_[i])] = result;
        }
    }

    size_t expert_of(int64_t result) const {
        const ggml_tensor * ids = op_->src[2];
        if (ids == nullptr) {
            return static_cast<size_t>(result / op_->ne[1] % op_->ne[2] * op_->src[0]->ne[2] / op_->ne[2]);
        }
        return *reinterpret_cast<const uint32_t *>(row_of(ids, result / op_->ne[1]) +
                                                   static_cast<size_t>(result % op_->ne[1]) * ids->nb[0]);
    }

    const ggml_tensor * op_ = nullptr;
    std::vector<Group> all_;  // by expert
    std::vector<Group> groups_;
    std::vector<int64_t> order_;
    std::vector<int64_t> places_;
    int64_t most_rows_ = 0;
};

class Product : public ggml::cpu::tensor_traits {
    static int64_t activation_bytes(const ggml_tensor * op) {
        return ggml_nrows(op) * Activations::row_bytes(described(op->src[0]));
    }

    static Activations activations_of(const Weights & weights, const Routing::Group & group, uint8_t * memory) {
        return Activations(weights.of_expert(group.expert), group.rows,
                           memory + group.first * Activations::row_bytes(weights));
    }

    // One thread's share: some blocks of as many rows as make a tile, in which they lie side by side. Threads that took
    // rows of one tile would write to the same cache lines: where two cores of a Zen 5 share no cache, a pass of 16 rows
    // of a 3B took 96 ms so, and takes 85. A row that several experts use is copied.
    static void quantise(const ggml_tensor * op, const Routing & routing, uint8_t * memory, int thread, int threads) {
        const ggml_tensor * x = op->src[1];
        const Weights weights = described(op->src[0]);
        const int64_t rows = ggml_nrows(x), blocks = weights.k / weights.format->length;
        const int64_t sets = (rows + weights.kernels->max_tile - 1) / weights.kernels->max_tile;
        const int64_t first = sets * blocks * thread / threads, last = sets * blocks * (thread + 1) / threads;
        for (int64_t set = first / blocks; set * blocks < last; set++) {
            const int64_t begin = std::max<int64_t>(first - set * blocks, 0);
            const int64_t end = std::min(last - set * blocks, blocks);
            for (int64_t row = rows * set / sets; row < rows * (set + 1) / sets; row++) {
                const int64_t result = routing.result_of(row, 0);
                const Activations activations = activations_of(weights, routing.group_of(result), memory);
                const auto * source = reinterpret_cast<const float *>(row_of(x, row));
                activations.quantise(routing.place(result), source, begin, end);
                for (int64_t use = 1; use < routing.uses(); use++) {
                    const int64_t other = routing.result_of(row, use);
                    activations_of(weights, routing.group_of(other), memory)
                        .copy(routing.place(other), activations, routing.place(result), begin, end);
                }
            }
        }
    }

    bool work_size(int threads, const ggml_tensor * op, size_t & size) override {
        size = kAlignment + Pieces::bytes(threads) + static_cast<size_t>(activation_bytes(op));
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        if (params->ith == 0) {
            library().products.fetch_add(1, std::memory_order_relaxed);
        }
        const Weights weights = described(op->src[0]);
        const Columns columns(op, weights);
        const Routing & routing = Routing::of(op);
        const auto groups = static_cast<int64_t>(routing.groups().size());
        Assistants & assistants = Assistants::all();
        const bool is_assisted =
            params->nth == 1 && assistants.any() && columns.are_all() && groups == 1;
        auto * scratch = aligned(params->wdata);
        auto * memory = scratch + Pieces::bytes(params->nth);
        if (is_assisted) {
            memory = static_cast<uint8_t *>(assistants.memory(activation_bytes(op)));
        }
        const int64_t bytes = routing.most_rows() > weights.kernels->max_tile ? kPieceOfPrompt : kPiece;
        const int64_t piece = std::clamp<int64_t>(
            bytes / weights.panel_bytes(), 1, std::max<int64_t>(1, groups * columns.panels() / (4 * params->nth)));
        quantise(op, routing, memory, params->ith, params->nth);
        // The rows of a result lie one after another, also those of several sequences.
        auto * out = reinterpret_cast<float *>(row_of(op, 0));
        if (is_assisted) {
            assistants.compute({activations_of(weights, routing.groups()[0], memory), piece, out});
            return true;
        }
        const int64_t pieces_of_group = (columns.panels() + piece - 1) / piece;
        const Pieces pieces(scratch, groups * pieces_of_group, params->nth);
        columns.clear(op, params->ith, params->nth);
        pieces.begin(params->ith);
        ggml_barrier(params->threadpool);

        for (int64_t p = pieces.take(params->ith); p >= 0; p = pieces.take(params->ith)) {
            const Routing::Group & group = routing.groups()[static_cast<size_t>(p / pieces_of_group)];
            const int64_t begin = p % pieces_of_group * piece;
            const int64_t * results = routing.order().data() + group.first;
            activations_of(weights, group, memory)
                .multiply(begin, std::min(columns.panels(), begin + piece), [&](int64_t i) { return columns.panel(i); },
                          [&](int64_t row) { return out + results[row] * op->ne[0]; });
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
        if (ggml_get_type_traits_cpu(op->src[0]->type)->vec_dot == nullptr) {
            GGML_ABORT("%s is of type %s, which has no product", op->src[0]->name, ggml_type_name(op->src[0]->type));
        }
        size = kAlignment + Pieces::bytes(threads) + static_cast<size_t>(ggml_nrows(op->src[1])) * row_bytes(op);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const ggml_tensor * weights = op->src[0];
        const ggml_tensor * x = op->src[1];
        if (params->ith == 0) {
            library().products.fetch_add(1, std::memory_order_relaxed);
            if (weights->op == GGML_OP_NONE) {
                library().left.fetch_or(kLeftFormat << weights->type, std::memory_order_relaxed);
            }
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
        const Routing & routing = Routing::of(op);
        const auto columns = weights->ne[1], groups = static_cast<int64_t>(routing.groups().size());
        const int64_t piece = std::clamp<int64_t>(kPiece / static_cast<int64_t>(weights->nb[1]), 1,
                                                  std::max<int64_t>(1, groups * columns / (4 * params->nth)));
        const int64_t pieces_of_group = (columns + piece - 1) / piece;
        const Pieces pieces(scratch, groups * pieces_of_group, params->nth);
        pieces.begin(params->ith);
        ggml_barrier(params->threadpool);

        auto * out = reinterpret_cast<float *>(row_of(op, 0));
        for (int64_t p = pieces.take(params->ith); p >= 0; p = pieces.take(params->ith)) {
            const Routing::Group & group = routing.groups()[static_cast<size_t>(p / pieces_of_group)];
            const int64_t begin = p % pieces_of_group * piece;
            for (int64_t i = group.first; i < group.first + group.rows; i++) {
                const int64_t result = routing.order()[static_cast<size_t>(i)];
                const uint8_t * row = rows + static_cast<size_t>(routing.input_of(result)) * bytes;
                for (int64_t column = begin; column < std::min(columns, begin + piece); column++) {
                    traits.vec_dot(static_cast<int>(k), out + result * columns + column, 0,
                                   row_of(weights, group.expert * columns + column), 0, row, 0, 1);
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
