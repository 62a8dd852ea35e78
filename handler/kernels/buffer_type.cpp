// A buffer type for weights: the way by which llama.cpp comes to these kernels.
//
// When a model is loaded, llama.cpp asks the CPU backend's extra buffer types, in order, whether they support the
// operation that a weight is for. Ours, which library.cpp puts first, says yes to matrix products, also with several
// experts' matrices: the weight is then allocated here, packed once in set_tensor if its format has kernels, and every
// product with it comes to graph_product.cpp.

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "assistants.h"
#include "cache.h"
#include "graph.h"

namespace specserve {

namespace {

constexpr size_t kHugePage = size_t{1} << 21;  // bytes

// The format of a weight if it can be packed, null if not; a matrix of one column counts, too.
const Format * format_of(const ggml_tensor * weights) {
    const Format * format = library().kernels->format_of(weights->type);
    const bool fits = format != nullptr && ggml_n_dims(weights) <= 3 && ggml_is_contiguous(weights) &&
                      weights->ne[0] % format->length == 0;
    return fits ? format : nullptr;
}

// Whether the loader is to give us this weight. Those without kernels would be repacked by ggml for kernels of its own. The
// loader calls the factors of a product (`attn_q.scale` in BitNet's files) its weights, too: only their names tell.
bool takes(const ggml_tensor * weights) {
    if (std::string_view(weights->name).ends_with("scale")) {
        return false;
    }
    const Format * format = format_of(weights);
    return format == nullptr ? library().formats != 0
                             : (library().formats >> (format - library().kernels->formats) & 1) != 0;
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
    int64_t growth = 0;
};

class Extra : public ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override {
        // A weight without data is a question of the loader's; one with data was taken. A view of it would have no panels.
        const bool is_product = op->op == GGML_OP_MUL_MAT_ID || op->op == GGML_OP_MUL_MAT;
        return is_product && op->src[0]->ne[3] == 1 && is_ours(op->src[0]) && op->src[0]->view_src == nullptr &&
               (op->src[0]->data != nullptr || takes(op->src[0])) && op->src[1]->type == GGML_TYPE_F32 &&
               (op->src[1]->buffer == nullptr || ggml_backend_buffer_is_host(op->src[1]->buffer));
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        const Cache * cache = library().cache;
        if (cache != nullptr && cache->loads() && op->op != GGML_OP_SET_ROWS && op->op != GGML_OP_FLASH_ATTN_EXT) {
            return &nothing();
        }
        switch (op->op) {
            case GGML_OP_SET_ROWS: return cache != nullptr ? &cache_write() : nullptr;
            case GGML_OP_MUL_MAT:
            case GGML_OP_MUL_MAT_ID:
                if (is_ours(op->src[0])) {
                    return format_of(op->src[0]) != nullptr ? &product() : &plain_product();
                }
                if (op->op_params[1] == GGML_HINT_SRC0_IS_HADAMARD) {
                    return nullptr;  // of an 8-bit cache's keys and values: ggml turns each row by itself
                }
                return multiplies_rows(op) ? &plain_product() : leave(kLeftProduct);
            case GGML_OP_FLASH_ATTN_EXT: return attends(op) ? &attention() : leave(kLeftAttention);
            default: return nullptr;
        }
    }

    // Whether ggml's product is one of weights that lie elsewhere (a token embedding that BitNet also has for a head), or of
    // a matrix for each row (Gemma 3n). Products of activations may else be of several rows, as in linear attention.
    static bool multiplies_rows(const ggml_tensor * op) {
        const ggml_tensor * matrix = op->src[0];
        const Cache * cache = library().cache;
        if (cache == nullptr || matrix->ne[3] != 1 || op->ne[3] != 1 || op->src[1]->type != GGML_TYPE_F32 ||
            matrix->buffer == nullptr || !ggml_backend_buffer_is_host(matrix->buffer)) {
            return false;  // or ggml has repacked it
        }
        const bool has_one_for_each = matrix->ne[2] == cache->rows() && op->ne[2] == cache->rows();
        return matrix->op == GGML_OP_NONE || (op->op == GGML_OP_MUL_MAT && has_one_for_each);
    }

    // Notes that ggml computes an operation. Every thread asks for every operation, so what is noted is only read.
    static ggml::cpu::tensor_traits * leave(int64_t kind) {
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
    if (format_of(tensor) == nullptr) {
        std::memcpy(tensor->data, source, ggml_nbytes(tensor));
        return;
    }
    const Weights weights = described(tensor);
    const int64_t growth = tensor->ne[2] * weights.bytes() - static_cast<int64_t>(ggml_nbytes(tensor));
    static_cast<Memory *>(tensor->buffer->context)->growth += growth;
    library().growth += growth;
    const auto threads = static_cast<int64_t>(std::clamp(std::thread::hardware_concurrency(), 1U, 8U));
    const auto share = [&](int64_t t) {
        for (int64_t expert = 0; expert < tensor->ne[2]; expert++) {
            weights.format->pack(weights, source + static_cast<size_t>(expert) * tensor->nb[2], weights.panels() * t / threads,
                                 weights.panels() * (t + 1) / threads,
                                 static_cast<uint8_t *>(tensor->data) + expert * weights.bytes());
        }
    };
    std::vector<std::thread> others;
    int64_t started = 1;
    try {
        for (; started < threads; started++) {
            others.emplace_back(share, started);
        }
    } catch (const std::system_error &) {
        // The process may start no more threads: this one does the rest.
    }
    share(0);
    for (int64_t t = started; t < threads; t++) {
        share(t);
    }
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
        Assistants::all().wait_idle();
        auto * memory = static_cast<Memory *>(buffer->context);
        library().growth -= memory->growth;
        std::free(memory->base);
        delete memory;
    };
    functions.get_base = [](ggml_backend_buffer_t buffer) { return static_cast<Memory *>(buffer->context)->base; };
    functions.set_tensor = set_tensor;
    functions.clear = [](ggml_backend_buffer_t buffer, uint8_t value) {
        std::memset(static_cast<Memory *>(buffer->context)->base, value, buffer->size);
    };
    return ggml_backend_buffer_init(type, functions, new Memory{*library().kernels, memory}, size);
}

size_t packed_bytes(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    const Format * format = format_of(tensor);
    if (format == nullptr) {
        return ggml_nbytes(tensor);
    }
    const Weights weights{library().kernels, format, tensor->ne[0], tensor->ne[1], nullptr};
    return static_cast<size_t>(tensor->ne[2] * weights.bytes());
}

}  // namespace

Weights described(const ggml_tensor * tensor) {
    const Kernels & kernels = static_cast<const Memory *>(tensor->buffer->context)->kernels;
    return {&kernels, kernels.format_of(tensor->type), tensor->ne[0], tensor->ne[1],
            static_cast<const uint8_t *>(tensor->data)};
}

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
