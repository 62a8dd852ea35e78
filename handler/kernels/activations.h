#pragma once

#include <algorithm>

#include "kernels.h"

namespace specserve {

// Rows in tiles of nearly the same size, quantised into memory that all threads share.
class Activations {
  public:
    Activations() = default;

    Activations(const Weights & w, int64_t rows, void * memory) : weights_(w), rows_(rows) {
        tiles_ = (rows + w.kernels->max_tile - 1) / w.kernels->max_tile;
        values_ = static_cast<int8_t *>(memory);
        scales_ = reinterpret_cast<float *>(values_ + rows * w.k);
        sums_ = reinterpret_cast<int32_t *>(scales_ + rows * blocks());
    }

    int64_t bytes() const { return rows_ * (weights_.k + 4 * blocks() * (1 + weights_.format->sums)); }
    const Weights & weights() const { return weights_; }
    int64_t rows() const { return rows_; }
    int64_t tiles() const { return tiles_; }
    int64_t first_row(int64_t tile) const { return rows_ * tile / tiles_; }

    Tile tile(int64_t t) const {
        const int64_t row = first_row(t);
        return {values_ + row * weights_.k, scales_ + row * blocks(), sums_ + row * blocks() * weights_.format->sums,
                static_cast<int>(first_row(t + 1) - row)};
    }

    // One thread's share: some blocks of all rows of a tile, which lie side by side. Threads that took rows of one tile
    // would write to the same cache lines: where two cores of a Zen 5 share no cache, a pass of 16 rows of a 3B took 96
    // ms so, and takes 85.
    template <class Source> void quantise(Source source, int thread, int threads) const {
        const int64_t first = tiles_ * blocks() * thread / threads;
        const int64_t last = tiles_ * blocks() * (thread + 1) / threads;
        for (int64_t t = first / blocks(); t * blocks() < last; t++) {
            const int64_t begin = std::max<int64_t>(first - t * blocks(), 0);
            const int64_t end = std::min(last - t * blocks(), blocks());
            for (int64_t row = first_row(t); row < first_row(t + 1); row++) {
                weights_.format->quantise(source(row), begin, end, tile(t), static_cast<int>(row - first_row(t)));
            }
        }
    }

    // Multiplies all rows by the panels panel_of(begin) to panel_of(end - 1): out[row * stride + column].
    template <class PanelOf> void multiply(int64_t begin, int64_t end, PanelOf panel_of, float * out, int64_t stride) const {
        for (int64_t t = 0; t < tiles_; t++) {
            for (int64_t i = begin; i < end; i++) {
                weights_.format->multiply(weights_, panel_of(i), tile(t), out + first_row(t) * stride, stride);
            }
        }
    }

  private:
    int64_t blocks() const { return weights_.k / weights_.format->length; }

    Weights weights_{};
    int64_t rows_ = 0;
    int64_t tiles_ = 0;
    int8_t * values_ = nullptr;
    float * scales_ = nullptr;
    int32_t * sums_ = nullptr;
};

}  // namespace specserve
