// A buffer type for weights: the way by which llama.cpp comes to these kernels.
//
// When a model is loaded, llama.cpp asks the CPU backend's extra buffer types, in order, whether they support the
// operation that a weight is for. Ours, which library.cpp puts first, says yes to matrix products of its formats: the
// weight is then allocated here, packed once in set_tensor, and every product with it comes to Product.

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "library.h"

namespace specserve {

namespace {

constexpr size_t kAlignment = 64;            // of a register and of a cache line
constexpr size_t kHugePage = size_t{1} << 21;
constexpr int64_t kPiece = 128 << 10;          // bytes of weights a thread takes at a time: some microseconds of reading
constexpr int64_t kPieceOfPrompt = 256 << 10;  // with several tiles, weights that stay in the second-level cache

// Whether there are kernels for a weight; a matrix of one column counts, too.
bool fits(const ggml_tensor * weights) {
    const int format = format_of(weights->type);
    return format >= 0 && ggml_n_dims(weights) <= 2 && ggml_is_contiguous(weights) && weights->ne[0] % block_length(static_cast<Format>(format)) == 0;
}

// Whether the loader is to give us this weight.
bool takes(const ggml_tensor * weights) {
    return fits(weights) && (library().formats >> format_of(weights->type) & 1) != 0;
}

// Bytes of a weight that is written piece by piece.
struct Upload {
    std::vector<uint8_t> bytes;
    size_t received = 0;
};

// What a buffer of this type owns. Weights stay with the variant that packed them, whatever is used later.
struct Memory {
    const Kernels & kernels;
    void * base;
    std::mutex lock{};
    std::map<const ggml_tensor *, Upload> uploads{};  // of weights that are not complete yet
};

const Kernels & kernels_of(const ggml_tensor * weights) {
    return static_cast<const Memory *>(weights->buffer->context)->kernels;
}

Weights described(const ggml_tensor * tensor) {
    return {static_cast<Format>(format_of(tensor->type)), tensor->ne[0], tensor->ne[1],
            static_cast<const uint8_t *>(tensor->data), library().non_temporal};
}

int64_t panels_of(const Weights & w, const Kernels & kernels) {
    return (w.columns + kernels.lanes - 1) / kernels.lanes;
}

// ---- the product ----

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

// Rows in tiles of nearly the same size, quantised into memory that all threads share.
class Activations {
  public:
    Activations(const Kernels & kernels, const Weights & w, int64_t rows, void * memory)
        : kernels_(kernels), format_(w.format), k_(w.k), rows_(rows) {
        tiles_ = (rows + kernels.max_tile - 1) / kernels.max_tile;
        values_ = static_cast<int8_t *>(memory);
        scales_ = reinterpret_cast<float *>(values_ + rows * k_);
        sums_ = reinterpret_cast<int32_t *>(scales_ + rows * scale_words(format_, k_));
    }

    static size_t bytes(const Weights & w, int64_t rows) {
        return static_cast<size_t>(rows * (w.k + 4 * scale_words(w.format, w.k) + 4 * sum_words(w.format, w.k)));
    }

    int64_t tiles() const { return tiles_; }
    int64_t first_row(int64_t tile) const { return rows_ * tile / tiles_; }

    Tile tile(int64_t t) const {
        const int64_t row = first_row(t);
        return {values_ + row * k_, scales_ + row * scale_words(format_, k_), sums_ + row * sum_words(format_, k_),
                static_cast<int>(first_row(t + 1) - row)};
    }

    // One thread's share: some blocks of all rows of a tile, which lie side by side. Threads that took rows of one tile
    // would write to the same cache lines: where two cores of a Zen 5 share no cache, a pass of 16 rows of a 3B took 96
    // ms so, and takes 85.
    template <class Source> void quantise(Source source, int thread, int threads) const {
        const int64_t blocks = k_ / block_length(format_);
        const int64_t first = tiles_ * blocks * thread / threads;
        const int64_t last = tiles_ * blocks * (thread + 1) / threads;
        for (int64_t t = first / blocks; t * blocks < last; t++) {
            const int64_t begin = std::max<int64_t>(first - t * blocks, 0);
            const int64_t end = std::min(last - t * blocks, blocks);
            for (int64_t row = first_row(t); row < first_row(t + 1); row++) {
                kernels_.quantise(format_, source(row), begin, end, tile(t), static_cast<int>(row - first_row(t)));
            }
        }
    }

  private:
    const Kernels & kernels_;
    Format format_;
    int64_t k_;
    int64_t rows_;
    int64_t tiles_;
    int8_t * values_;
    float * scales_;
    int32_t * sums_;
};

// Which panels of a product are computed: all, or of the head some groups of columns (specserve_compute_head).
class Columns {
  public:
    Columns(const ggml_tensor * op, int64_t panels, int lanes) : panels_(panels), lanes_(lanes) {
        if (library().head_groups != nullptr && std::strcmp(op->name, "result_output") == 0) {
            groups_ = library().head_groups;
            panels_ = library().head_count * kHeadGroup / lanes;
            while (panel(panels_ - 1) >= panels) {
                panels_--;  // the last group may be cut short
            }
        }
    }

    int64_t panels() const { return panels_; }

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

class Product : public ggml::cpu::tensor_traits {
    bool work_size(int threads, const ggml_tensor * op, size_t & size) override {
        size = kAlignment + Pieces::bytes(threads) + Activations::bytes(described(op->src[0]), ggml_nrows(op->src[1]));
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const ggml_tensor * x = op->src[1];
        const Weights weights = described(op->src[0]);
        const Kernels & kernels = kernels_of(op->src[0]);
        const Columns columns(op, panels_of(weights, kernels), kernels.lanes);
        const int64_t panels = columns.panels();
        const int64_t panel_bytes = kernels.panel_bytes(weights.format, weights.k);
        const int64_t rows = ggml_nrows(x);
        const bool several_tiles = rows > kernels.max_tile;
        const int64_t piece = std::clamp<int64_t>((several_tiles ? kPieceOfPrompt : kPiece) / panel_bytes, 1,
                                                  std::max<int64_t>(1, panels / (4 * params->nth)));
        auto * scratch = static_cast<uint8_t *>(params->wdata);
        scratch += (kAlignment - reinterpret_cast<uintptr_t>(scratch) % kAlignment) % kAlignment;
        const Pieces pieces(scratch, (panels + piece - 1) / piece, params->nth);
        const Activations activations(kernels, weights, rows, scratch + Pieces::bytes(params->nth));
        const auto row_of = [](const ggml_tensor * t, int64_t row) {
            const int64_t i1 = row % t->ne[1];
            const int64_t i2 = row / t->ne[1] % t->ne[2];
            const int64_t i3 = row / t->ne[1] / t->ne[2];
            return static_cast<char *>(t->data) + static_cast<size_t>(i1) * t->nb[1] +
                   static_cast<size_t>(i2) * t->nb[2] + static_cast<size_t>(i3) * t->nb[3];
        };
        activations.quantise([&](int64_t row) { return reinterpret_cast<const float *>(row_of(x, row)); }, params->ith,
                             params->nth);
        columns.clear(op, params->ith, params->nth);
        pieces.begin(params->ith);
        if (params->ith == 0) {
            library().products.fetch_add(1, std::memory_order_relaxed);
        }
        ggml_barrier(params->threadpool);

        for (int64_t p = pieces.take(params->ith); p >= 0; p = pieces.take(params->ith)) {
            const int64_t end = std::min(panels, (p + 1) * piece);
            for (int64_t t = 0; t < activations.tiles(); t++) {
                // The rows of a result lie one after another, also those of several sequences.
                auto * out = reinterpret_cast<float *>(row_of(op, activations.first_row(t)));
                for (int64_t panel = p * piece; panel < end; panel++) {
                    kernels.multiply(weights, columns.panel(panel), activations.tile(t), out, op->ne[0]);
                }
            }
        }
        return true;
    }
};

// ---- attention ----

// What attention.h can do: half precision keys and values of all sequences in one cache, without what few models have.
bool attends(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0];
    const ggml_tensor * k = op->src[1];
    const ggml_tensor * v = op->src[2];
    const ggml_tensor * mask = op->src[3];
    float max_bias;
    float softcap;
    std::memcpy(&max_bias, op->op_params + 1, sizeof max_bias);
    std::memcpy(&softcap, op->op_params + 2, sizeof softcap);
    return library().formats != 0 && q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 &&
           mask != nullptr && mask->type == GGML_TYPE_F16 && mask->ne[2] == 1 && op->src[4] == nullptr &&
           max_bias == 0 && softcap == 0 && q->ne[3] == 1 && k->ne[3] == 1 && k->ne[0] == v->ne[0] &&
           k->ne[0] % 16 == 0 && q->nb[0] == 4 && k->nb[0] == 2 && v->nb[0] == 2 && q->ne[2] % k->ne[2] == 0 &&
           q->ne[2] / k->ne[2] <= kMaxHeads;
}

class SharedAttention : public ggml::cpu::tensor_traits {
    static size_t scratch(const ggml_tensor * op) {
        const ggml_tensor * k = op->src[1];
        const int64_t bytes = library().kernels->attention_scratch(k->ne[1], op->src[0]->ne[2] / k->ne[2], k->ne[0]);
        return (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
    }

    bool work_size(int threads, const ggml_tensor * op, size_t & size) override {
        size = kAlignment + static_cast<size_t>(threads) * scratch(op);
        return true;
    }

    // The work of a few rows and a key head is a piece; where there are fewer pieces than threads, the query heads of
    // one key head are divided.
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const ggml_tensor * q = op->src[0];
        const ggml_tensor * k = op->src[1];
        const ggml_tensor * v = op->src[2];
        const ggml_tensor * mask = op->src[3];
        const int64_t groups = (q->ne[1] + kMaxRows - 1) / kMaxRows;
        const int64_t key_heads = k->ne[2];
        const int64_t shared = q->ne[2] / key_heads;
        const int64_t parts = std::clamp<int64_t>(params->nth / (groups * key_heads), 1, shared);
        float scale;
        std::memcpy(&scale, op->op_params, sizeof scale);
        if (params->ith == 0) {
            library().attentions.fetch_add(1, std::memory_order_relaxed);
        }
        const auto at = [](const ggml_tensor * t, int64_t i1, int64_t i2) {
            return static_cast<char *>(t->data) + static_cast<size_t>(i1) * t->nb[1] + static_cast<size_t>(i2) * t->nb[2];
        };
        auto * memory = static_cast<uint8_t *>(params->wdata);
        memory += (kAlignment - reinterpret_cast<uintptr_t>(memory) % kAlignment) % kAlignment;
        memory += static_cast<size_t>(params->ith) * scratch(op);
        const int64_t pieces = groups * key_heads * parts;
        for (int64_t piece = pieces * params->ith / params->nth; piece < pieces * (params->ith + 1) / params->nth;
             piece++) {
            const int64_t part = piece % parts;
            const int64_t key_head = piece / parts % key_heads;
            const int64_t group = piece / parts / key_heads;
            const int64_t first = shared * part / parts;
            const int64_t head = key_head * shared + first;
            const int64_t row = q->ne[1] * group / groups;
            Attention a{};
            a.cells = k->ne[1];
            a.size = k->ne[0];
            a.heads = static_cast<int>(shared * (part + 1) / parts - first);
            a.scale = scale;
            a.queries = at(q, row, head);
            a.query_stride = q->nb[2];
            a.query_row_stride = q->nb[1];
            a.keys = at(k, 0, key_head);
            a.key_stride = k->nb[1];
            a.values = at(v, 0, key_head);
            a.value_stride = v->nb[1];
            a.out = at(op, head, row);
            a.out_stride = op->nb[1];
            a.out_row_stride = op->nb[2];
            a.mask_stride = static_cast<int64_t>(mask->nb[1] / 2);
            library().kernels->attend(a, reinterpret_cast<const uint16_t *>(at(mask, row, 0)),
                                      static_cast<int>(q->ne[1] * (group + 1) / groups - row), memory);
        }
        return true;
    }
};

class Extra : public ggml::cpu::extra_buffer_type {
    Product product_;
    SharedAttention attention_;

    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override {
        // A weight without data is a question of the loader's; one with data was taken.
        return op->op == GGML_OP_MUL_MAT && is_ours(op->src[0]) && (op->src[0]->data != nullptr || takes(op->src[0])) &&
               op->src[1]->type == GGML_TYPE_F32 &&
               (op->src[1]->buffer == nullptr || ggml_backend_buffer_is_host(op->src[1]->buffer));
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        switch (op->op) {
            case GGML_OP_MUL_MAT: return is_ours(op->src[0]) ? &product_ : leave(kLeftProduct);
            case GGML_OP_MUL_MAT_ID: return leave(kLeftProduct);
            case GGML_OP_FLASH_ATTN_EXT: return attends(op) ? &attention_ : leave(kLeftAttention);
            default: return nullptr;
        }
    }

    // Notes that ggml computes an operation. Every thread asks for every operation, so what is noted is only read.
    static ggml::cpu::tensor_traits * leave(int kind) {
        if ((library().left.load(std::memory_order_relaxed) & kind) == 0) {
            library().left.fetch_or(kind, std::memory_order_relaxed);
        }
        return nullptr;
    }

    static bool is_ours(const ggml_tensor * weights) {
        return weights->buffer != nullptr && ggml_backend_buffer_get_type(weights->buffer) == buffer_type();
    }
};

// ---- the buffer ----

// Huge pages spare one row, which reads a gigabyte, the walk through a quarter of a million page table entries.
void * allocate(size_t size) {
    void * base = std::aligned_alloc(kHugePage, (size + kHugePage - 1) / kHugePage * kHugePage);
    if (base != nullptr && size > 0) {
        madvise(base, size, MADV_HUGEPAGE);
    }
    return base;
}

void pack(ggml_tensor * tensor, const uint8_t * source) {
    const Weights weights = described(tensor);
    const Kernels & kernels = kernels_of(tensor);
    const int64_t panels = panels_of(weights, kernels);
    const auto threads = static_cast<int64_t>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
    const auto share = [&](int64_t t) {
        kernels.pack(weights, source, panels * t / threads, panels * (t + 1) / threads,
                     static_cast<uint8_t *>(tensor->data));
    };
    std::vector<std::thread> others;
    for (int64_t t = 1; t < threads; t++) {
        others.emplace_back(share, t);
    }
    share(0);
    for (std::thread & other : others) {
        other.join();
    }
}

// llama.cpp writes a weight at once today; from pinned memory it writes pieces. A panel needs whole columns, so pieces
// are kept until all are there.
void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const auto * source = static_cast<const uint8_t *>(data);
    if (size == ggml_nbytes(tensor)) {
        pack(tensor, source);
        return;
    }
    auto * memory = static_cast<Memory *>(buffer->context);
    const std::lock_guard guard(memory->lock);
    Upload & upload = memory->uploads[tensor];
    upload.bytes.resize(ggml_nbytes(tensor));
    std::copy(source, source + size, upload.bytes.begin() + static_cast<std::ptrdiff_t>(offset));
    upload.received += size;
    if (upload.received == upload.bytes.size()) {
        pack(tensor, upload.bytes.data());
        memory->uploads.erase(tensor);
    }
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    void * memory = allocate(std::max<size_t>(size, 1));
    if (memory == nullptr) {
        return nullptr;
    }
    ggml_backend_buffer_i functions{};
    functions.free_buffer = [](ggml_backend_buffer_t buffer) {
        std::free(static_cast<Memory *>(buffer->context)->base);
        delete static_cast<Memory *>(buffer->context);
    };
    functions.get_base = [](ggml_backend_buffer_t buffer) { return static_cast<Memory *>(buffer->context)->base; };
    functions.set_tensor = set_tensor;
    functions.clear = [](ggml_backend_buffer_t buffer, uint8_t value) {
        std::memset(static_cast<Memory *>(buffer->context)->base, value, buffer->size);
    };
    return ggml_backend_buffer_init(type, functions, new Memory{*library().kernels, memory}, size);
}

size_t packed_bytes(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    if (!fits(tensor)) {
        return ggml_nbytes(tensor);
    }
    const Weights weights = described(tensor);
    const Kernels & kernels = *library().kernels;
    return static_cast<size_t>(panels_of(weights, kernels) * kernels.panel_bytes(weights.format, weights.k));
}

}  // namespace

ggml_backend_buffer_type_t buffer_type() {
    static Extra extra;
    static ggml_backend_buffer_type type = {
        {[](ggml_backend_buffer_type_t) { return "SPECSERVE"; }, alloc_buffer,
         [](ggml_backend_buffer_type_t) { return kAlignment; }, nullptr, packed_bytes, nullptr},
        ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU),
        &extra,
    };
    return &type;
}

}  // namespace specserve
