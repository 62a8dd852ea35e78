// Attention of a few rows over a cache that all sequences share, included by each variant after product.h.
//
// For one row and one head: scores s_i = scale x (q . k_i) over the cells i that the row may see, weights
// p_i = exp(s_i - max s), result sum(p_i v_i) / sum(p_i).
//
// A sequence's cells lie wherever there was room, among those of others, so the order in which they are met differs
// from one run to the next. The result must not: texts are promised to be the same in any company. A score depends on
// its own cell only, a maximum on no order, and the two sums are made exact, so that they do not depend on one either:
//
// - sum(p_i) is a sum of integers, the weights in units of 2^-30.
// - sum(p_i v_i) is a sum of floats that all have the same exponent. It starts at 1.5 x 2^(E+1), where 2^E is more than
//   the sum of all magnitudes, and so stays between 2^(E+1) and 2^(E+2): every addition rounds the product to a
//   multiple of 2^(E-22), whatever was added before. Only a product exactly between two multiples would be rounded
//   by what the sum is so far, and there is none: the last bit of every p_i is set, so a product's last bit is worth
//   less than 2^(E-23), half such a multiple.
//
// So the sums cost one fused multiply-add a product, as they would anyway. Their error, some 2^-22 of the largest value,
// is a thousandth of that of the values themselves, which have half precision.

#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace {

constexpr float kLeastWeight = 0x1p-30F;
// Room for the rounding of 2^17 products and of the weights' own sum.
constexpr float kRounding = 1.02F;


// exp(x) for x <= 0; 0 below -87. Relative error 2e-7.
inline Floats exp_of_negative(Floats x) {
    const Floats n = to_integral(mul(x, all(1.44269504F)));
    // ln 2 in two parts, so that the remainder loses nothing.
    const Floats r = fnma(n, all(-2.12194440e-4F), fnma(n, all(0.693359375F), x));
    Floats y = all(1.9875691500e-4F);
    y = fma(y, r, all(1.3981999507e-3F));
    y = fma(y, r, all(8.3334519073e-3F));
    y = fma(y, r, all(4.1665795894e-2F));
    y = fma(y, r, all(1.6666665459e-1F));
    y = fma(y, r, all(5.0000001201e-1F));
    y = fma(mul(y, r), r, add(r, all(1.0F)));
    return times_power_of_two(y, max(n, all(-126.0F)));
}

// ---- which cells ----

// The cells that any of `rows` rows may see, filled up to whole registers with the last one; their number.
inline int64_t visible_cells(const Attention & a, const uint16_t * mask, int rows, int32_t * cells) {
    int32_t * end = cells;
    uint16_t hidden[kHalves];
    for (int64_t first = 0; first < a.cells; first += kHalves) {
        const int64_t width = std::min<int64_t>(kHalves, a.cells - first);
        std::memset(hidden, 0xff, sizeof hidden);
        for (int row = 0; row < rows; row++) {
            const uint16_t * from = mask + row * a.mask_stride + first;
            for (int64_t i = 0; i < width; i++) {
                hidden[i] &= from[i];  // minus infinity has its sign bit set, 0 has not
            }
        }
        end = append_not_negative(hidden, static_cast<int32_t>(first), end);
    }
    const int64_t count = end - cells;
    for (int i = 0; i < kLanes && count > 0; i++) {
        end[i] = end[-1];
    }
    return count;
}

// How many of the next rows are worth attending to together: those of one sequence see nearly the same cells, and share
// the work of widening them. `cells` is scratch memory; the rows' common cells are in it afterwards, `count` of them.
inline int rows_together(const Attention & a, const uint16_t * mask, int rows, int32_t * cells, int64_t & count) {
    const int64_t one = visible_cells(a, mask, 1, cells);
    if (rows > 1) {
        count = visible_cells(a, mask, rows, cells);
        if (count <= one + kLanes) {
            return rows;
        }
        visible_cells(a, mask, 1, cells);
    }
    count = one;
    return 1;
}

// ---- scores and weights ----

// Half precision to float: one register's worth of keys or of values, one cell after the other.
inline void widen_cells(const char * from, size_t stride, const int32_t * cells, int64_t size, float * to) {
    for (int c = 0; c < kLanes; c++) {
        const char * cell = from + static_cast<size_t>(cells[c]) * stride;
        for (int64_t i = 0; i < size; i += kLanes) {
            store_floats(to + c * size + i, halves(cell + 2 * i));
        }
    }
}

// Scores of one register's worth of cells for every head of a row.
inline void score_cells(const Attention & a, const float * queries, const float * keys, float * scores,
                        int64_t stride) {
    for (int head = 0; head < a.heads; head++) {
        const float * q = queries + head * a.size;
        Floats products[kLanes];
        UNROLL
        for (int c = 0; c < kLanes; c++) {
            products[c] = mul(load_floats(q), load_floats(keys + c * a.size));
        }
        for (int64_t i = kLanes; i < a.size; i += kLanes) {
            const Floats x = load_floats(q + i);
            UNROLL
            for (int c = 0; c < kLanes; c++) {
                products[c] = fma(x, load_floats(keys + c * a.size + i), products[c]);
            }
        }
        store_floats(scores + head * stride, sums_of_lanes(products));
    }
}

// Scores to weights, in place, with 0 for what fills the last register up; their sum in units of kLeastWeight.
inline int64_t weigh(float * scores, int64_t count) {
    Floats most = all(-INFINITY);
    for (int64_t i = 0; i < count; i += kLanes) {
        most = max(most, load_floats(scores + i));  // what fills up repeats a cell
    }
    most = all(largest(most));
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
        const Floats weights = odd_or_zero(exp_of_negative(sub(load_floats(scores + i), most)), kLeastWeight);
        store_floats(scores + i, weights);
        int32_t units[kLanes];
        const Ints rounded = to_int(mul(weights, all(1 / kLeastWeight)));
        std::memcpy(units, &rounded, sizeof units);
        for (int64_t lane = 0; lane < kLanes && i + lane < count; lane++) {
            sum += units[lane];
        }
    }
    for (int64_t i = count; i % kLanes != 0; i++) {
        scores[i] = 0;
    }
    return sum;
}

// ---- values ----

// The largest magnitude of a cell's values.
inline float largest_value(const char * value, int64_t size) {
    Floats most = zero();
    for (int64_t i = 0; i < size; i += kLanes) {
        const Floats x = halves(value + 2 * i);
        most = max(most, max(x, sub(zero(), x)));
    }
    return largest(most);
}

// Adds the weighted values of one register's worth of cells to `vectors` registers of a head's sums.
template <int vectors>
inline void add_values(const float * weights, const float * values, int64_t size, float * to) {
    Floats sums[vectors];
    UNROLL
    for (int v = 0; v < vectors; v++) {
        sums[v] = load_floats(to + v * kLanes);
    }
    for (int c = 0; c < kLanes; c++) {
        const Floats weight = all(weights[c]);
        UNROLL
        for (int v = 0; v < vectors; v++) {
            sums[v] = fma(weight, load_floats(values + c * size + v * kLanes), sums[v]);
        }
    }
    UNROLL
    for (int v = 0; v < vectors; v++) {
        store_floats(to + v * kLanes, sums[v]);
    }
}

// ---- the whole ----

constexpr int64_t room_for(int64_t cells) { return (cells + kHalves + kLanes) / kLanes * kLanes; }

// Rows that see nearly the same cells.
inline void attend_together(const Attention & a, int first_row, int rows, const uint16_t * mask, const int32_t * cells,
                            int64_t count, float * scratch) {
    const int64_t room = room_for(a.cells);
    const int64_t row_scores = a.heads * room;
    const int64_t row_size = a.heads * a.size;
    float * scores = scratch;
    float * most = scores + rows * row_scores;  // largest magnitudes of the cells' values
    float * queries = most + room;
    float * sums = queries + rows * row_size;
    float * wide = sums + rows * row_size;

    for (int row = 0; row < rows; row++) {
        for (int head = 0; head < a.heads; head++) {
            const auto * q = reinterpret_cast<const float *>(
                a.queries + static_cast<size_t>(first_row + row) * a.query_row_stride +
                static_cast<size_t>(head) * a.query_stride);
            for (int64_t i = 0; i < a.size; i++) {
                queries[row * row_size + head * a.size + i] = a.scale * q[i];
            }
        }
    }
    for (int64_t i = 0; i < count; i += kLanes) {
        widen_cells(a.keys, a.key_stride, cells + i, a.size, wide);
        for (int row = 0; row < rows; row++) {
            score_cells(a, queries + row * row_size, wide, scores + row * row_scores + i, room);
        }
    }

    for (int64_t i = 0; i < count; i++) {
        most[i] = largest_value(a.values + static_cast<size_t>(cells[i]) * a.value_stride, a.size);
    }
    float starts[kMaxRows][kMaxHeads];
    float totals[kMaxRows][kMaxHeads];
    for (int row = 0; row < rows; row++) {
        const uint16_t * row_mask = mask + row * a.mask_stride;
        float bound = 0;
        for (int64_t i = 0; i < count; i++) {
            if (row_mask[cells[i]] >> 15 == 0) {
                bound = std::max(bound, most[i]);
            } else {
                for (int head = 0; head < a.heads; head++) {
                    scores[row * row_scores + head * room + i] = -INFINITY;
                }
            }
        }
        for (int64_t i = count; i % kLanes != 0; i++) {
            for (int head = 0; head < a.heads; head++) {
                scores[row * row_scores + head * room + i] = -INFINITY;
            }
        }
        for (int head = 0; head < a.heads; head++) {
            const int64_t units = weigh(scores + row * row_scores + head * room, count);
            totals[row][head] = static_cast<float>(units) * kLeastWeight;
            int exponent;
            std::frexp(kRounding * bound * totals[row][head], &exponent);
            starts[row][head] = std::ldexp(1.5F, exponent + 1);
            for (int64_t i = 0; i < a.size; i += kLanes) {
                store_floats(sums + row * row_size + head * a.size + i, all(starts[row][head]));
            }
        }
    }

    for (int64_t i = 0; i < count; i += kLanes) {
        widen_cells(a.values, a.value_stride, cells + i, a.size, wide);
        for (int row = 0; row < rows; row++) {
            for (int head = 0; head < a.heads; head++) {
                float * to = sums + row * row_size + head * a.size;
                const float * weights = scores + row * row_scores + head * room + i;
                int64_t first = 0;
                for (; first + 8 * kLanes <= a.size; first += 8 * kLanes) {
                    add_values<8>(weights, wide + first, a.size, to + first);
                }
                for (; first < a.size; first += kLanes) {
                    add_values<1>(weights, wide + first, a.size, to + first);
                }
            }
        }
    }
    for (int row = 0; row < rows; row++) {
        for (int head = 0; head < a.heads; head++) {
            auto * out = reinterpret_cast<float *>(a.out + static_cast<size_t>(first_row + row) * a.out_row_stride +
                                                   static_cast<size_t>(head) * a.out_stride);
            const float scale = count > 0 ? 1 / totals[row][head] : 0;
            const float * from = sums + row * row_size + head * a.size;
            for (int64_t i = 0; i < a.size; i++) {
                out[i] = (from[i] - starts[row][head]) * scale;
            }
        }
    }
}

// `rows` rows of one key head, for the query heads that share it; `scratch` has attention_scratch() bytes.
void attend(const Attention & a, const uint16_t * mask, int rows, void * scratch) {
    auto * cells = static_cast<int32_t *>(scratch);
    auto * rest = reinterpret_cast<float *>(cells + room_for(a.cells));
    for (int row = 0; row < rows;) {
        const uint16_t * from = mask + row * a.mask_stride;
        int64_t count = 0;
        const int together = rows_together(a, from, rows - row, cells, count);
        attend_together(a, row, together, from, cells, count, rest);
        row += together;
    }
}

int64_t attention_scratch(int64_t cells, int64_t heads, int64_t size) {
    const int64_t room = room_for(cells);
    return 4 * (2 * room + kMaxRows * heads * (room + 2 * size) + kLanes * size);
}

}  // namespace
