// What Python calls (handler/specserve/engine/kernels.py), all of it with C linkage.

#include "assistants.h"
#include "cache.h"
#include "library.h"

#include <cstring>
#include <initializer_list>
#include <string_view>

namespace specserve {

Library & library() {
    static Library it;
    return it;
}

namespace {

constexpr bool is_verified(std::string_view version) {
    for (const std::string_view verified : kVerified) {
        if (version == verified) {
            return true;
        }
    }
    return false;
}

#ifdef __aarch64__
constexpr auto kVariants = {i8mm, asimddp, asimd};
#else
constexpr auto kVariants = {avx512_vnni, avx_vnni, avx2};
#endif

const Kernels * variant_named(const char * name) {
    for (const auto variant : kVariants) {
        const Kernels * kernels = variant();
        if (kernels != nullptr && (*name == '\0' || std::strcmp(name, kernels->name) == 0)) {
            return kernels;
        }
    }
    return nullptr;
}

}  // namespace

}  // namespace specserve

using namespace specserve;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Looked for in the library's file before it is loaded: the llama-cpp-python whose internals it knows.
EXPORT const char specserve_built_for[];
const char specserve_built_for[] = "specserve kernels for llama-cpp-python " SPECSERVE_BUILT_FOR;
static_assert(is_verified(SPECSERVE_BUILT_FOR), "ggml_internals.h is not verified for this llama-cpp-python");

// Make a variant the one in use (the best one for ""); its name, null where this processor has none of that name.
// Models that are loaded keep the variant that packed their weights.
EXPORT const char * specserve_use(const char * variant) {
    const Kernels * kernels = variant_named(variant);
    if (kernels == nullptr) {
        return nullptr;
    }
    library().kernels = kernels;
    auto & types = ggml_backend_cpu_get_extra_buffer_types();
    if (types.empty() || types.front() != buffer_type()) {
        types.insert(types.begin(), buffer_type());
    }
    return kernels->name;
}

// The name of format n of the variant in use; null after the last one.
EXPORT const char * specserve_format(int n) {
    const Kernels & kernels = *library().kernels;
    return n < kernels.n_formats ? ggml_type_name(kernels.formats[n].type) : nullptr;
}

// Which formats of weights that are loaded from now on are taken, bit n for format n.
EXPORT void specserve_take(unsigned formats) { library().formats = formats; }

// From now on passes compute these ascending groups of 16 columns of the head, the product that llama.cpp names
// result_output; other columns are minus infinity. Null for the whole head. The array must outlive the passes.
EXPORT void specserve_compute_head(const int32_t * groups, int64_t count) {
    library().head_groups = groups;
    library().head_count = count;
}

// From now on products of passes that run in one thread are helped by one on each of these cores (assistants.h).
EXPORT void specserve_assist(const int32_t * cores, int64_t count) { Assistants::all().run_on(cores, count); }

// How often a graph came to a product or to attention of ours, since the library was loaded; and Library::growth.
EXPORT int64_t specserve_products() { return library().products.load(); }
EXPORT int64_t specserve_growth() { return library().growth.load(); }
EXPORT int64_t specserve_attentions() { return library().attentions.load(); }

// What was left to ggml since the last call: see kLeftProduct in library.h; and a type's name.
EXPORT int64_t specserve_left() { return library().left.exchange(0); }
EXPORT const char * specserve_type(int type) { return ggml_type_name(static_cast<ggml_type>(type)); }

// See ProductCase in library.h; by the variant in use, and by the format's number.
EXPORT double specserve_run_product(int ours, int format, int64_t k, int64_t columns, const uint8_t * weights, int pieces,
                                    int64_t rows, const float * x, const int32_t * chosen, int64_t experts, int64_t used,
                                    int64_t inputs, int threads, int repeats, float * out) {
    return run_product({ours != 0, library().kernels->formats + format, k, columns, rows, weights, pieces, x, chosen,
                        experts, used, inputs}, threads, repeats, out);
}
EXPORT int specserve_max_tile() { return library().kernels->max_tile; }

// See AttentionCase in library.h; 0 where it did not come to our kernels.
EXPORT int specserve_attend(int64_t size, int64_t value_size, int64_t cells, int64_t key_heads, int64_t heads,
                            int64_t rows, float scale, float softcap, const float * queries, const float * keys,
                            const float * values, const int32_t * positions, const uint16_t * mask, const float * sinks,
                            int is_8_bit, int threads, float * out) {
    return run_attention({size, value_size, cells, key_heads, heads, rows, scale, softcap, queries, keys, values,
                          positions, mask, sinks, is_8_bit != 0},
                         threads, out);
}

// The KV cache of a context, for attention of ours; it is freed after the context.
EXPORT void * specserve_new_cache() { return new Cache; }
EXPORT void specserve_free_cache(void * cache) { delete static_cast<Cache *>(cache); }

// From now on passes are of this cache's context, and write rows at these positions (cache.h); null for other passes.
EXPORT void specserve_begin_pass(void * cache, const int32_t * positions, int64_t rows, const uint8_t * saved) {
    library().cache = static_cast<Cache *>(cache);
    if (cache != nullptr) {
        library().cache->begin_pass(positions, rows, saved);
    }
}

// The cells of the last pass's rows, their number, the bytes that a cell takes when it is saved, and saved cells.
EXPORT const int32_t * specserve_cells(const void * cache) { return static_cast<const Cache *>(cache)->cells().data(); }
EXPORT int64_t specserve_cell_count(const void * cache) {
    return static_cast<int64_t>(static_cast<const Cache *>(cache)->cells().size());
}
EXPORT int64_t specserve_cell_bytes(const void * cache) { return static_cast<const Cache *>(cache)->cell_bytes(); }
EXPORT void specserve_save(const void * cache, const int32_t * cells, int64_t count, uint8_t * to) {
    static_cast<const Cache *>(cache)->save(cells, count, to);
}
