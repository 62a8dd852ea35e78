// Attention of a graph: the work of a few rows and a key head is a piece.

#include <algorithm>
#include <atomic>
#include <cstring>

#include "graph.h"

namespace specserve {

namespace {

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

    // Where there are fewer pieces than threads, the query heads of one key head are divided.
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
        auto * memory = aligned(params->wdata);
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

}  // namespace

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

ggml::cpu::tensor_traits & attention() {
    static SharedAttention it;
    return it;
}

}  // namespace specserve
