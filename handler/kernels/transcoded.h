// Formats whose values another one has, too, only coded otherwise: they are packed as its blocks.

#pragma once

#include "q5_1.h"
#include "q6_k.h"
#include "q8_0.h"

namespace {

// Q5_0: d (half), 4 bytes with a fifth bit of each weight, 16 bytes as those of Q4_0; weight = d x (5 bits - 16).
struct Q5_0 : Q8_0 {
    static constexpr ggml_type type = GGML_TYPE_Q5_0;
    static constexpr int bytes = 22;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        uint8_t other[Q8_0::bytes];
        std::memcpy(other, block, 2);
        for (int i = 0; i < 32; i++) {
            other[2 + i] = static_cast<uint8_t>(five_bits(block + 2, i) - 16);
        }
        Q8_0::pack(other, weights, side, lane);
    }
};

// Q4_1: d, m (half), 16 bytes as those of Q4_0; weight = d x nibble + m.
struct Q4_1 : Q5_1 {
    static constexpr ggml_type type = GGML_TYPE_Q4_1;
    static constexpr int bytes = 20;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        uint8_t values[32];
        for (int i = 0; i < 32; i++) {
            values[i] = block[4 + i % 16] >> (i < 16 ? 0 : 4) & 0x0f;
        }
        pack_values(values, block, weights, side, lane);
    }
};

// Q3_K: 32 bytes of upper bits, 64 bytes of lower 2 bits, 12 bytes with 16 scales of 6 bits, d (half); sub-blocks of 16
// as those of Q6_K; weight = d x (scale - 32) x (3 bits - 4).
struct Q3_K : Q6_K {
    static constexpr ggml_type type = GGML_TYPE_Q3_K;
    static constexpr int bytes = 110;

    static void pack(const uint8_t * block, uint8_t * weights, uint8_t * side, int lane) {
        uint8_t values[256];
        for (int i = 0; i < 256; i++) {
            const int low = block[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
            const int upper = block[i % 32] >> (i / 32) & 1;
            values[i] = static_cast<uint8_t>((low | upper << 2) - 4 + 32);
        }
        uint8_t scales[16];
        for (int j = 0; j < 16; j++) {
            const int low = block[96 + j % 8] >> (j < 8 ? 0 : 4) & 0x0f;
            const int upper = block[104 + j % 4] >> (j / 4 * 2) & 3;
            scales[j] = static_cast<uint8_t>((low | upper << 4) - 32);
        }
        pack_values(values, scales, block + 108, weights, side, lane);
    }
};

}  // namespace
