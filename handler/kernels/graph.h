// What the buffer type and the operations of a graph share.

#pragma once

#include "library.h"

namespace specserve {

constexpr size_t kAlignment = 64;  // of a register and of a cache line

inline uint8_t * aligned(void * memory) {
    auto * bytes = static_cast<uint8_t *>(memory);
    return bytes + (kAlignment - reinterpret_cast<uintptr_t>(bytes) % kAlignment) % kAlignment;
}

// A weight of the buffer type; in a mixture of experts that of the first one.
Weights described(const ggml_tensor *);

// A matrix product with such a weight, also of experts, and with one in GGUF's own layout by ggml's dot products
// (graph_product.cpp).
ggml::cpu::tensor_traits & product();
ggml::cpu::tensor_traits & plain_product();

// Attention, and whether an operation is one that attention.h can do; a write into a KV cache; and what takes the place
// of all other operations while saved keys and values are loaded (graph_attention.cpp).
ggml::cpu::tensor_traits & attention();
bool attends(const ggml_tensor * op);
ggml::cpu::tensor_traits & cache_write();
ggml::cpu::tensor_traits & nothing();

}  // namespace specserve
