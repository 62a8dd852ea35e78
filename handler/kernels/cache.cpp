#include "cache.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace specserve {

namespace {

// The tensor that views look at, which is the whole of a layer's keys or values.
const ggml_tensor * root(const ggml_tensor * tensor) { return tensor->view_src != nullptr ? tensor->view_src : tensor; }

// Huge pages, where the kernel has them, spare attention most of its walks through page tables; llama.cpp has touched the
// memory already.
void use_huge_pages(void * memory, size_t bytes) {
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
    const auto end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
    if (end > begin) {
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_COLLAPSE);
    }
}

// Calls move(where, bytes) for all that a cell holds.
template <class Move> void copy(const Stored & stored, int64_t cell, Move move) {
    for (int64_t head = 0; head < stored.heads; head++) {
        move(stored.at(head, cell), static_cast<size_t>(stored.bytes()));
        move(&stored.scale(head, cell), sizeof(float));
        if (stored.multipliers != nullptr) {
            move(stored.multipliers_at(head, cell), static_cast<size_t>(stored.size / kTogether));
        }
    }
}

const int64_t * cells_of(const ggml_tensor * write) { return static_cast<const int64_t *>(write->src[1]->data); }

}  // namespace

int64_t Side::cell_bytes() const {
    int64_t bytes = 0;
    copy(stored, 0, [&](const void *, size_t some) { bytes += static_cast<int64_t>(some); });
    return bytes;
}

void Cache::begin_pass(const int32_t * positions, int64_t rows, const uint8_t * saved) {
    positions_ = positions;
    rows_ = rows;
    saved_ = saved;
    pass_++;
    writes_.clear();
    reads_.clear();
    cells_.clear();
}

void Cache::plan_write(const ggml_tensor * op) { writes_[op->data] = op; }

void Cache::add_side(const ggml_tensor * tensor, Side & side, bool are_keys, int64_t first, int64_t size) {
    const ggml_tensor * whole = root(tensor);
    const int64_t cells = whole->ne[1];
    side.are_keys = are_keys;
    side.first = first;
    side.scales.assign(static_cast<size_t>(cells * tensor->ne[2]), 0);
    if (tensor->type == GGML_TYPE_Q8_0) {
        side.multipliers.assign(static_cast<size_t>(cells * tensor->ne[2] * size / kTogether), 0);
    }
    uint8_t * multipliers = side.multipliers.empty() ? nullptr : side.multipliers.data();
    side.stored = {static_cast<char *>(whole->data), side.scales.data(), multipliers, cells, tensor->ne[2], size};
    side.stored.data += first * (side.stored.bytes() / size) * cells * tensor->ne[2];
    use_huge_pages(whole->data, ggml_nbytes(whole));
    side.offset = cell_bytes_;
    sides_.emplace(whole->data, &side);
    cell_bytes_ += side.cell_bytes();
}

Read & Cache::plan_attention(const ggml_tensor * op) {
    const void * keys = root(op->src[1])->data;
    const auto [found_layer, is_new] = layers_.try_emplace(keys);
    Layer & layer = found_layer->second;
    if (is_new) {
        const int64_t size = op->src[1]->ne[0], size_of_values = op->src[2]->ne[0];
        if (root(op->src[2])->data != keys) {
            add_side(op->src[1], layer.keys, true, 0, size);
            add_side(op->src[2], layer.values, false, 0, size_of_values);
        } else {
            add_side(op->src[1], layer.keys, true, 0, size_of_values);
            layer.values.stored = layer.keys.stored;
            if (size > size_of_values) {
                add_side(op->src[1], layer.rest, true, size_of_values, size - size_of_values);
            }
        }
        layer.positions.assign(static_cast<size_t>(root(op->src[1])->ne[1]), 0);
    }
    if (const auto found = writes_.find(keys); found != writes_.end()) {
        const ggml_tensor * write = found->second;
        if (write->src[1]->ne[0] != rows_) {
            std::fprintf(stderr, "specserve: a pass of %lld rows writes %lld\n", static_cast<long long>(rows_),
                         static_cast<long long>(write->src[1]->ne[0]));
            std::abort();
        }
        const int64_t * cells = cells_of(write);
        for (int64_t row = 0; row < rows_; row++) {
            layer.positions[static_cast<size_t>(cells[row])] = positions_[row];
        }
        if (cells_.empty()) {
            cells_.assign(cells, cells + rows_);
        }
        same_cells_ = same_cells_ && std::equal(cells_.begin(), cells_.end(), cells);
    }
    Read & read = reads_[op];
    read.layer = &layer;
    read.pieces.store(0, std::memory_order_relaxed);
    read.merged_pieces.store(0, std::memory_order_relaxed);
    if (!loads()) {
        const ggml_tensor * mask = op->src[3];
        auto & [pass, plan] = plans_[mask->data];
        if (pass != pass_) {
            pass = pass_;
            plan.make(static_cast<const char *>(mask->data), mask->nb[1], op->src[1]->ne[1], op->src[0]->ne[1],
                      layer.positions);
        }
        read.plan = &plan;
    }
    return read;
}

bool Cache::write(const ggml_tensor * op, int thread, int threads) {
    const auto [begin, end] = sides_.equal_range(op->data);
    std::for_each(begin, end, [&](const auto & found) { write(op, *found.second, thread, threads); });
    return begin != end;
}

void Cache::write(const ggml_tensor * op, Side & side, int thread, int threads) {
    const ggml_tensor * source = op->src[0];
    const int64_t * cells = cells_of(op);
    const Kernels & kernels = *library().kernels;
    const int64_t rows = source->ne[1];
    const Stored & stored = side.stored;
    const int64_t first = rows * thread / threads;
    const int64_t last = rows * (thread + 1) / threads;
    if (loads()) {
        for (int64_t row = first; row < last; row++) {
            copy(stored, cells[row], [from = saved_ + row * cell_bytes_ + side.offset](void * to, size_t bytes) mutable {
                std::memcpy(to, from, bytes);
                from += bytes;
            });
        }
        return;
    }
    const auto store = side.are_keys ? kernels.store_keys : kernels.store_values;
    for (int64_t row = first; row < last; row++) {
        store(reinterpret_cast<const float *>(static_cast<const char *>(source->data) +
                                              static_cast<size_t>(row) * source->nb[1]) + side.first,
              stored, cells[row]);
    }
}

void Cache::save(const int32_t * cells, int64_t count, uint8_t * to) const {
    for (const auto & [data, side] : sides_) {
        for (int64_t i = 0; i < count; i++) {
            copy(side->stored, cells[i], [at = to + i * cell_bytes_ + side->offset](const void * from, size_t bytes) mutable {
                std::memcpy(at, from, bytes);
                at += bytes;
            });
        }
    }
}

}  // namespace specserve
