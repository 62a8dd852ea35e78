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

    // A whole number of cache lines, so that those of several products may lie one after another.
    static int64_t row_bytes(const Weights & w) {
        return (w.k + 4 * w.k / w.format->length * (1 + w.format->sums) + 63) / 64 * 64;
    }
    int64_t bytes() const { return rows_ * row_bytes(weights_); }
    const Weights & weights() const { return weights_; }
    int64_t rows() const { return rows_; }
    int64_t tiles() const { return tiles_; }
    int64_t first_row(int64_t tile) const { return rows_ * tile / tiles_; }

    Tile tile(int64_t t) const {
        const int64_t row = first_row(t);
        return {values_ + row * weights_.k, scales_ + row * blocks(), sums_ + row * blocks() * weights_.format->sums,
                static_cast<int>(first_row(t + 1) - row)};
    }

    // Blocks [first, last) of a row of floats.
    void quantise(int64_t row, const float * source, int64_t first, int64_t last) const {
        const int64_t t = tile_of(row);
        weights_.format->quantise(source, first, last, tile(t), static_cast<int>(row - first_row(t)));
    }

    // The same, of a row that others hold.
    void copy(int64_t row, const Activations & others, int64_t other_row, int64_t first, int64_t last) const {
        const int64_t t = tile_of(row), other_t = others.tile_of(other_row);
        const Tile to = tile(t), from = others.tile(other_t);
        const int64_t begin = row - first_row(t), other_begin = other_row - others.first_row(other_t);
        const auto copy_runs = [&](auto * into, const auto * of, int64_t runs, int64_t run) {
            for (int64_t i = first * runs; i < last * runs; i++) {
                std::copy_n(of + (i * from.rows + other_begin) * run, run, into + (i * to.rows + begin) * run);
            }
        };
        copy_runs(to.values, from.values, weights_.format->length / 32, 32);
        copy_runs(to.scales, from.scales, 1, 1);
        copy_runs(to.sums, from.sums, weights_.format->sums, 1);
    }

    // Multiplies all rows by the panels panel_of(begin) to panel_of(end - 1): out_of(row)[column].
    template <class PanelOf, class OutOf> void multiply(int64_t begin, int64_t end, PanelOf panel_of, OutOf out_of) const {
        for (int64_t t = 0; t < tiles_; t++) {
            float * out[kMostRows];
            std::generate_n(out, tile(t).rows, [&, row = first_row(t)]() mutable { return out_of(row++); });
            for (int64_t i = begin; i < end; i++) {
                weights_.format->multiply(weights_, panel_of(i), tile(t), out);
            }
        }
    }

  private:
    int64_t blocks() const { return weights_.k / weights_.format->length; }
    int64_t tile_of(int64_t row) const { return ((row + 1) * tiles_ - 1) / rows_; }

    Weights weights_{};
    int64_t rows_ = 0;
    int64_t tiles_ = 0;
    int8_t * values_ = nullptr;
    float * scales_ = nullptr;
    int32_t * sums_ = nullptr;
};

}  // namespace specserve
