// The table of a variant's functions, included by its .cpp after the vector operations.

#pragma once

#include "attention.h"
#include "product.h"

namespace {

constexpr Kernels kernels_named(const char * name) {
    return {name,         kLanes,       kMaxTile,          kFormats,      sizeof kFormats / sizeof *kFormats,
            store_keys,   store_values, attention_scratch, result_floats, read_queries,
            attend,       merge,        finish};
}

}  // namespace
