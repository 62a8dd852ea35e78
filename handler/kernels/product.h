// The kernels themselves, written once over the vector operations of a simd_*.h; each variant's .cpp includes one of
// these and then this file, with compiler flags of its own. Everything is in an unnamed namespace: a function that two
// variants shared by name would be merged by the linker, and an old processor would meet instructions it lacks.
//
// How a tile of rows is multiplied by a panel of columns:
//
//   for every block of 32 weights along k:
//     unpack the block of all columns once: 8 registers, each with 4 weights of every column
//     for every row of the tile:
//       8 dot products of 4 bytes: the row's activations are the same for all columns, so they are broadcast
//       multiply the integer sum by the scales, add to the row's sums
//
// multiply_vnni.h and multiply_avx2.h do this, each in the order and with the integers that its instructions want.
// So weights are read and unpacked once for all rows of a tile, and a row's sums are added in the same order, that of
// k, whatever the number of rows, the panel, and the thread: its result is the same bit for bit in any company.
//
// Both multiply unsigned by signed bytes. 4-bit weights are stored as w + 8 (q4_0), w + 32 (q6_k) or are unsigned
// anyway (q4_k); what the shift adds is 8 (or 32) times the sum of the activations, and every integer sum begins with
// minus that, from Tile::sums.

#pragma once

#include "kernels.h"

// Loops over the rows of a tile and the registers of a block: only unrolled do their arrays stay in registers.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

using namespace specserve;

constexpr int kVector = 4 * kLanes;  // bytes of a register
// ---- layout ----

constexpr int64_t weight_bytes(Format format) {  // of a panel's block, without its scales
    switch (format) {
        case Format::q4_0: return 4 * kVector;
        case Format::q8_0: return 8 * kVector;
        case Format::q4_k: return 32 * kVector;
        case Format::q6_k: return 48 * kVector;
    }
    return 0;
}

constexpr int64_t side_bytes(Format format) {  // scales of a panel's block
    switch (format) {
        case Format::q4_0:
        case Format::q8_0: return 2 * kLanes;
        case Format::q4_k: return 4 * kVector;      // d, dmin; scales and minima of 6 bits in 3 registers
        case Format::q6_k: return 5 * kVector;  // 16 scales of 8 bits, d
    }
    return 0;
}

constexpr int64_t source_bytes(Format format) {  // a block of one column, in a GGUF file
    switch (format) {
        case Format::q4_0: return 18;
        case Format::q8_0: return 34;
        case Format::q4_k: return 144;
        case Format::q6_k: return 210;
    }
    return 0;
}

int64_t panel_bytes(Format format, int64_t k) {
    return k / block_length(format) * (weight_bytes(format) + side_bytes(format));
}

// Blocks whose scales lie together, before their weights: as many as make whole vectors.
constexpr int64_t group_of_blocks(Format format) {
    switch (format) {
        case Format::q4_0:
        case Format::q8_0: return 8;
        case Format::q4_k:
        case Format::q6_k: return 1;
    }
    return 0;
}

// use(weights, side) for every block of a panel along k. A product of a row reads as fast as memory only if it comes to
// every line of 64 bytes in order, so that processors fetch ahead by themselves: scales that are used later are touched.
template <typename Byte, typename Use>
inline void for_blocks(Format format, int64_t blocks, Byte * panel, Use use) {
    for (int64_t first = 0; first < blocks; first += group_of_blocks(format)) {
        const int64_t count = std::min(group_of_blocks(format), blocks - first);
        Byte * side = panel;
        for (int64_t i = 0; i < count * side_bytes(format); i += 64) {
            _mm_prefetch(reinterpret_cast<const char *>(side + i), _MM_HINT_T0);
        }
        panel += count * side_bytes(format);
        for (int64_t i = 0; i < count; i++) {
            use(panel, side);
            panel += weight_bytes(format);
            side += side_bytes(format);
        }
    }
}

// Bytes to 4-byte groups: group g of a column goes to lane `lane` of one of every `apart` registers.
inline void spread(const uint8_t * from, int groups, uint8_t * to, int lane, int apart = 1) {
    for (int g = 0; g < groups; g++) {
        std::memcpy(to + g * apart * kVector + 4 * lane, from + 4 * g, 4);
    }
}

// q4_0: d (half), 16 bytes: weight j in the low nibble of byte j, weight 16 + j in the high one.
// q8_0: d (half), 32 signed bytes.
inline void pack_32(const uint8_t * block, int groups, uint8_t * weights, uint8_t * side, int lane) {
    std::memcpy(side + 2 * lane, block, 2);
    spread(block + 2, groups, weights, lane);
}

// q4_k: d, dmin (half), 12 bytes with 8 scales and 8 minima of 6 bits, 128 bytes: of each 32 bytes the low nibbles are
// one sub-block of 32 weights, the high nibbles the next.
inline void pack_q4_k(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
    std::memcpy(side + 2 * lane, block, 2);
    std::memcpy(side + 2 * (kLanes + lane), block + 2, 2);
    const uint8_t * six = block + 4;
    uint8_t scale[8];
    uint8_t minimum[8];
    for (int j = 0; j < 4; j++) {
        scale[j] = six[j] & 63;
        minimum[j] = six[j + 4] & 63;
        scale[j + 4] = static_cast<uint8_t>((six[j + 8] & 0x0f) | ((six[j] >> 6) << 4));
        minimum[j + 4] = static_cast<uint8_t>((six[j + 8] >> 4) | ((six[j + 4] >> 6) << 4));
    }
    // Three registers of 8-bit fields whose upper two bits together hold the fourth: scales 0-3, scales 4-7 (a
    // sub-block after the other), minima 0-3 (two sub-blocks side by side); spread over them minima 4-7.
    uint8_t * fields = side + kVector;
    for (int j = 0; j < 4; j++) {
        const int pair = (j / 2) * 2 * kLanes + 2 * lane + j % 2;  // where minimum j of this column lies
        const uint8_t rest = minimum[j + 4];
        fields[j * kLanes + lane] |= scale[j];
        fields[kVector + j * kLanes + lane] |= scale[j + 4];
        fields[2 * kVector + pair] |= minimum[j];
        for (int part = 0; part < 3; part++) {
            fields[part * kVector + pair] |= static_cast<uint8_t>(((rest >> (2 * part)) & 3) << 6);
        }
    }
    spread(block + 16, 32, weights, lane);
}

// q6_k: 128 bytes of low nibbles, 64 bytes of upper 2 bits, 16 signed scales, d (half); of each half of the block 64 bytes
// of nibbles and 32 of upper bits: four times 32 weights. Here every 64 weights have 8 registers of nibbles, as those of
// q4_k, and 4 of upper bits, in the order in which a kernel comes to them.
inline void pack_q6_k(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
    uint8_t values[256];
    for (int i = 0; i < 256; i++) {
        const int byte = i % 32 + 32 * (i / 128);
        const int nibble = block[i % 64 + 64 * (i / 128)] >> (i % 128 < 64 ? 0 : 4) & 0x0f;
        const int upper = block[128 + byte] >> (2 * (i % 128 / 32)) & 0x03;
        values[i] = static_cast<uint8_t>(nibble | upper << 4);
    }
    for (int pair = 0; pair < 4; pair++) {
        const uint8_t * first = values + 64 * pair;
        const uint8_t * second = first + 32;
        uint8_t nibbles[32];
        uint8_t upper[16];
        for (int i = 0; i < 32; i++) {
            nibbles[i] = static_cast<uint8_t>((first[i] & 0x0f) | second[i] << 4);
        }
        for (int i = 0; i < 16; i++) {
            upper[i] = static_cast<uint8_t>(first[i] >> 4 | first[16 + i] >> 4 << 2 | second[i] >> 4 << 4 |
                                            second[16 + i] >> 4 << 6);
        }
        uint8_t * to = weights + 12 * pair * kVector;
        spread(nibbles, 4, to, lane, 2);
        spread(upper, 4, to + kVector, lane, 2);
        spread(nibbles + 16, 4, to + 8 * kVector, lane);
    }
    for (int j = 0; j < 16; j++) {
        side[j * kLanes + lane] = block[192 + j];
    }
    std::memcpy(side + 16 * kLanes + 2 * lane, block + 208, 2);
}

void pack(const Weights & w, const uint8_t * source, int64_t first, int64_t last, uint8_t * destination) {
    const int64_t blocks = w.k / block_length(w.format);
    const int64_t column_bytes = blocks * source_bytes(w.format);
    const int64_t bytes = panel_bytes(w.format, w.k);
    for (int64_t panel = first; panel < last; panel++) {
        uint8_t * to = destination + panel * bytes;
        std::memset(to, 0, static_cast<size_t>(bytes));
        for (int lane = 0; lane < kLanes && panel * kLanes + lane < w.columns; lane++) {
            const uint8_t * block = source + (panel * kLanes + lane) * column_bytes;
            for_blocks(w.format, blocks, to, [&](uint8_t * weights, uint8_t * side) {
                switch (w.format) {
                    case Format::q4_0: pack_32(block, 4, weights, side, lane); break;
                    case Format::q8_0: pack_32(block, 8, weights, side, lane); break;
                    case Format::q4_k: pack_q4_k(block, weights, side, lane); break;
                    case Format::q6_k: pack_q6_k(block, weights, side, lane); break;
                }
                block += source_bytes(w.format);
            });
        }
    }
}

// ---- activations ----

inline int32_t start_of_32(const int8_t * activations, int bias) {
    return add_starts(start_of_16(activations, bias), start_of_16(activations + 16, bias));
}

// A block's largest magnitude becomes 127. `sums` are what the format's kernel wants to begin or end with:
// q4_0: -8 x the sum of 32; q8_0: -128 x that where bytes were made unsigned; q6_k: -32 x the sum of 16 (these three as
// start_of_16 writes them); q4_k: the sums of 32 as they are, two in a word, to be multiplied by the minima.
void quantise(Format format, const float * source, int64_t first, int64_t last, const Tile & tile, int row) {
    const int length = block_length(format);
    for (int64_t block = first; block < last; block++) {
        const float * x = source + block * length;
        const float largest = largest_magnitude(x, length);
        tile.scales[block * tile.rows + row] = largest / 127.0F;
        const float factor = largest > 0 ? 127.0F / largest : 0.0F;
        for (int part = 0; part < length / 32; part++) {
            const int64_t group = block * (length / 32) + part;  // of 32, along the whole row
            int8_t * bytes = tile.values + (group * tile.rows + row) * 32;
            round_32(x + 32 * part, factor, bytes);
            int32_t * sums = tile.sums + group * tile.rows + row;
            switch (format) {
                case Format::q4_0: *sums = start_of_32(bytes, 8); break;
                case Format::q8_0: *sums = start_of_32(bytes, kByteBias); break;
                case Format::q4_k: {
                    const auto half = static_cast<int16_t>(sum_of_16(bytes) + sum_of_16(bytes + 16));
                    auto * word = tile.sums + (block * tile.rows + row) * 4 + part / 2;
                    std::memcpy(reinterpret_cast<char *>(word) + 2 * (part % 2), &half, 2);
                    break;
                }
                case Format::q6_k:
                    sums = tile.sums + 2 * group * tile.rows + row;
                    sums[0] = start_of_16(bytes, 32);
                    sums[tile.rows] = start_of_16(bytes + 16, 32);
                    break;
            }
        }
    }
}

// ---- products ----

// Weights and scales are asked for `ahead` bytes before they are needed (Library::prefetch).
template <Hint hint, int64_t bytes> inline void prefetch(const uint8_t * weights, int64_t ahead) {
    for (int64_t i = 0; hint != Hint::none && i < bytes; i += 64) {
        _mm_prefetch(reinterpret_cast<const char *>(weights + ahead + i), hint == Hint::nta ? _MM_HINT_NTA : _MM_HINT_T1);
    }
}

template <int rows> using Sums = Floats[rows];

// A block's 6-bit scales [8 sub-blocks][lane] and minima [4 pairs of sub-blocks][lane][2] of q4_k, as bytes.
inline void unpack_q4_k(const uint8_t * side, uint8_t * scale, uint8_t * minimum) {
    const Ints a = load(side + kVector);
    const Ints b = load(side + 2 * kVector);
    const Ints c = load(side + 3 * kVector);
    const Ints six_bits = all_bytes(0x3f);
    const auto keep = [](uint8_t * to, Ints x) { std::memcpy(to, &x, sizeof x); };
    keep(scale, bits_and(a, six_bits));
    keep(scale + kVector, bits_and(b, six_bits));
    keep(minimum, bits_and(c, six_bits));
    keep(minimum + kVector, bits_or(bits_and(shift_right<6>(a), all_bytes(0x03)),
                                    bits_or(bits_and(shift_right<4>(b), all_bytes(0x0c)),
                                            bits_and(shift_right<2>(c), all_bytes(0x30)))));
}

}  // namespace

// multiply_32, multiply_q4_k and multiply_q6_k.
#ifdef HAS_DOT
#include "multiply_vnni.h"
#else
#include "multiply_avx2.h"
#endif

namespace {

template <Format format, int rows, Hint hint>
void multiply_tile(const Weights & w, int64_t panel, const Tile & tile, float * out, int64_t stride) {
    const uint8_t * weights = w.data + panel * panel_bytes(format, w.k);
    const int64_t column = panel * kLanes;
    const int64_t ahead = w.prefetch_for(rows).ahead;
    Sums<rows> sums;
    UNROLL
    for (int r = 0; r < rows; r++) {
        sums[r] = zero();
        // Another thread has read what lies here: its copy is withdrawn while the sums are computed (8 rows of a 3B
        // take 46 ms so where cores share no cache, 47 without).
        _m_prefetchw(out + r * stride + column);
    }
    if constexpr (format == Format::q4_k) {
        multiply_q4_k<rows, hint>(weights, w.k, ahead, tile, sums);
    } else if constexpr (format == Format::q6_k) {
        multiply_q6_k<rows, hint>(weights, w.k, ahead, tile, sums);
    } else {
        multiply_32<format, rows, hint>(weights, w.k, ahead, tile, sums);
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        store(out + r * stride + column, sums[r], w.columns - column);
    }
}

using TileFunction = void (*)(const Weights &, int64_t, const Tile &, float *, int64_t);

// A function for every number of rows, so that loops over rows are unrolled and sums stay in registers.
template <Format format, Hint hint, int rows = 1>
constexpr TileFunction tile_function(int wanted) {
    if constexpr (rows == kMaxTile) {
        return multiply_tile<format, rows, hint>;
    } else {
        return wanted == rows ? multiply_tile<format, rows, hint> : tile_function<format, hint, rows + 1>(wanted);
    }
}

template <Format format>
TileFunction tile_function(const Weights & w, const Tile & tile) {
    switch (w.prefetch_for(tile.rows).hint) {
        case Hint::none: return tile_function<format, Hint::none>(tile.rows);
        case Hint::t1: return tile_function<format, Hint::t1>(tile.rows);
        case Hint::nta: return tile_function<format, Hint::nta>(tile.rows);
    }
    return nullptr;
}

void multiply(const Weights & w, int64_t panel, const Tile & tile, float * out, int64_t stride) {
    switch (w.format) {
        case Format::q4_0: tile_function<Format::q4_0>(w, tile)(w, panel, tile, out, stride); break;
        case Format::q8_0: tile_function<Format::q8_0>(w, tile)(w, panel, tile, out, stride); break;
        case Format::q4_k: tile_function<Format::q4_k>(w, tile)(w, panel, tile, out, stride); break;
        case Format::q6_k: tile_function<Format::q6_k>(w, tile)(w, panel, tile, out, stride); break;
    }
}

}  // namespace
