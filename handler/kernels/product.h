// The kernels themselves, written once over the vector operations of a simd_*.h and the structs of weight formats; each
// variant's .cpp includes one of the former and then variant.h, with compiler flags of its own. Everything is in an unnamed
// namespace: a function that two variants shared by name would be merged by the linker, and an old processor would meet
// instructions it lacks.
//
// How a tile of rows is multiplied by a panel of columns:
//
//   for every block of 32 weights along k:
//     unpack the block of all columns once: 8 registers, each with 4 weights of every column
//     for every row of the tile:
//       8 dot products of 4 bytes: the row's activations are the same for all columns, so they are broadcast
//       multiply the integer sum by the scales, add to the row's sums
//
// So weights are read and unpacked once for all rows of a tile, and a row's sums are added in the same order, that of
// k, whatever the number of rows, the panel, and the thread: its result is the same bit for bit in any company.

#pragma once

#include "floats.h"
#include "iq4_xs.h"
#include "q2_k.h"
#include "q4_k.h"
#include "transcoded.h"

namespace {

// use(weights, side) for every block of a panel along k. A product of a row reads as fast as memory only if it comes to
// every line of 64 bytes in order, so that processors fetch ahead by themselves: scales that are used later are touched.
template <class F, typename Byte, typename Use> inline void for_blocks(int64_t blocks, Byte * panel, Use use) {
    for (int64_t first = 0; first < blocks; first += F::group) {
        const int64_t count = std::min<int64_t>(F::group, blocks - first);
        Byte * side = panel;
        for (int64_t i = 0; i < count * F::side_bytes; i += 64) {
            __builtin_prefetch(side + i);
        }
        panel += count * F::side_bytes;
        for (int64_t i = 0; i < count; i++) {
            use(panel, side);
            panel += F::weight_bytes;
            side += F::side_bytes;
        }
    }
}

template <class F>
void pack(const Weights & w, const uint8_t * source, int64_t first, int64_t last, uint8_t * destination) {
    const int64_t blocks = w.k / F::length;
    for (int64_t panel = first; panel < last; panel++) {
        uint8_t * to = destination + panel * w.panel_bytes();
        std::memset(to, 0, static_cast<size_t>(w.panel_bytes()));
        for (int lane = 0; lane < kLanes && panel * kLanes + lane < w.columns; lane++) {
            const uint8_t * block = source + (panel * kLanes + lane) * blocks * F::bytes;
            for_blocks<F>(blocks, to, [&](uint8_t * weights, uint8_t * side) {
                F::pack(block, weights, side, lane);
                block += F::bytes;
            });
        }
    }
}

// A block's largest magnitude becomes 127.
template <class F> void quantise(const float * source, int64_t first, int64_t last, const Tile & tile, int row) {
    for (int64_t block = first; block < last; block++) {
        const float * x = source + block * F::length;
        int32_t * sums = tile.sums + block * F::sums * tile.rows + row;
        if constexpr (requires { F::keep; }) {
            F::keep(x, sums, tile.rows);
        } else {
            const float largest = largest_magnitude(x, F::length);
            tile.scales[block * tile.rows + row] = largest / 127.0F;
            const float factor = largest > 0 ? 127.0F / largest : 0.0F;
            for (int part = 0; part < F::length / 32; part++) {
                int8_t * bytes = tile.values + ((block * (F::length / 32) + part) * tile.rows + row) * 32;
                round_32(x + 32 * part, factor, bytes);
                F::sum(bytes, part, sums, tile.rows);
            }
        }
    }
}

template <class F, int rows>
void multiply_tile(const Weights & w, int64_t panel, const Tile & tile, float * const * out) {
    const int64_t column = panel * kLanes;
    Sums<rows> sums;
    UNROLL
    for (int r = 0; r < rows; r++) {
        sums[r] = zero();
        // Another thread has read what lies here: its copy is withdrawn while the sums are computed (8 rows of a 3B
        // take 46 ms so where cores share no cache, 47 without).
        __builtin_prefetch(out[r] + column, 1);
    }
    Activations x{tile.values, tile.scales, tile.sums};
    for_blocks<F>(w.k / F::length, w.data + panel * w.panel_bytes(), [&](const uint8_t * weights, const uint8_t * side) {
        F::template multiply<rows>(weights, side, x, sums);
        x.values += F::length * rows;
        x.scales += rows;
        x.sums += F::sums * rows;
    });
    UNROLL
    for (int r = 0; r < rows; r++) {
        store(out[r] + column, sums[r], w.columns - column);
    }
}

// A function for every number of rows, so that loops over rows are unrolled and sums stay in registers.
template <class F, int rows = 1> constexpr auto tile_function(int wanted) {
    if constexpr (rows == kMaxTile) {
        return multiply_tile<F, rows>;
    } else {
        return wanted == rows ? multiply_tile<F, rows> : tile_function<F, rows + 1>(wanted);
    }
}

static_assert(kMaxTile <= kMostRows);

template <class F> void multiply(const Weights & w, int64_t panel, const Tile & tile, float * const * out) {
    tile_function<F>(tile.rows)(w, panel, tile, out);
}

template <class F>
constexpr Format kFormat = {F::type, F::length, F::sums, F::weight_bytes + F::side_bytes,
                            pack<F>, quantise<typename F::Kernel>, multiply<typename F::Kernel>};

constexpr Format kFormats[] = {kFormat<Q4_0>,   kFormat<Q8_0>,   kFormat<Q4_K>,  kFormat<Q6_K>, kFormat<Q5_0>,
                               kFormat<IQ4_NL>, kFormat<Q3_K>,   kFormat<Q5_K>,  kFormat<Q4_1>, kFormat<Q5_1>,
                               kFormat<Q2_K>,   kFormat<IQ4_XS>, kFormat<MXFP4>, kFormat<F32>,  kFormat<F16>,
                               kFormat<BF16>};

}  // namespace
