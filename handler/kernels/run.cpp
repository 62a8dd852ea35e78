// Products and attention by way of ggml graphs of their own: for the trial of the kernels, for doctor, and for tests.

#include <ggml-alloc.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "cache.h"
#include "library.h"

namespace specserve {

namespace {

template <auto destroy> struct Destroy {
    template <class T> void operator()(T * it) const { destroy(it); }
};
using Context = std::unique_ptr<ggml_context, Destroy<ggml_free>>;
using Buffer = std::unique_ptr<ggml_backend_buffer, Destroy<ggml_backend_buffer_free>>;
using Backend = std::unique_ptr<ggml_backend, Destroy<ggml_backend_free>>;

Context context() { return Context(ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})); }

ggml_tensor * weights_of(const ProductCase & given, ggml_context * context) {
    return ggml_new_tensor_3d(context, given.format->type, given.k, given.columns, given.experts);
}

ggml_tensor * product_of(const ProductCase & given, ggml_tensor * weights, ggml_context * context) {
    if (given.chosen == nullptr) {
        return ggml_mul_mat(context, weights, ggml_new_tensor_2d(context, GGML_TYPE_F32, given.k, given.rows));
    }
    ggml_tensor * x = ggml_new_tensor_3d(context, GGML_TYPE_F32, given.k, given.inputs, given.rows);
    return ggml_mul_mat_id(context, weights, x, ggml_new_tensor_2d(context, GGML_TYPE_I32, given.used, given.rows));
}

// Where ggml itself would put these weights: into the first of its own extra buffer types that takes them, or as they
// are.
ggml_backend_buffer_type_t stock_buffer_type(const ProductCase & given) {
    const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    for (const ggml_backend_buffer_type_t type : ggml_backend_cpu_get_extra_buffer_types()) {
        if (type == buffer_type()) {
            continue;
        }
        const Context scratch = context();
        ggml_tensor * weights = weights_of(given, scratch.get());
        const Buffer empty(ggml_backend_buft_alloc_buffer(type, 0));
        weights->buffer = empty.get();
        if (ggml_backend_dev_supports_op(cpu, product_of(given, weights, scratch.get()))) {
            return type;
        }
    }
    return ggml_backend_cpu_buffer_type();
}

// Computes a graph by the CPU backend, once and some repetitions; `set` writes the inputs of the run with so many after it,
// `out` receives the last result.
// Returns the seconds of the fastest repetition, which neighbours on the machine disturbed least, or of the first run if
// there is none; infinite ones if the backend failed.
double compute(ggml_context * tensors, ggml_tensor * result, int threads, int repeats,
               const std::function<void(int)> & set, float * out) {
    ggml_cgraph * graph = ggml_new_graph(tensors);
    ggml_build_forward_expand(graph, result);
    const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(tensors, ggml_backend_cpu_buffer_type()));
    const Backend backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_backend_cpu_set_n_threads(backend.get(), threads);
    double fastest = INFINITY;
    for (int i = 0; i <= repeats; i++) {
        set(repeats - i);
        const auto begin = std::chrono::steady_clock::now();
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            return INFINITY;
        }
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        fastest = i == 1 ? seconds : std::min(fastest, seconds);  // the first run warms up
    }
    ggml_backend_tensor_get(result, out, 0, ggml_nbytes(result));
    return fastest;
}

}  // namespace

double run_product(const ProductCase & given, int threads, int repeats, float * out) {
    const Context weight_context = context();
    const Context context_of_rows = context();
    ggml_tensor * weights = weights_of(given, weight_context.get());
    const Buffer weight_buffer(ggml_backend_alloc_ctx_tensors_from_buft(
        weight_context.get(), given.ours ? buffer_type() : stock_buffer_type(given)));
    for (size_t piece = 0, size = ggml_nbytes(weights), n = static_cast<size_t>(given.pieces); piece < n; piece++) {
        const size_t begin = size * piece / n;
        ggml_backend_tensor_set(weights, given.weights + begin, begin, size * (piece + 1) / n - begin);
    }
    ggml_tensor * product = product_of(given, weights, context_of_rows.get());
    const auto set = [&](int left) {
        ggml_backend_tensor_set(product->src[1], given.x, 0, ggml_nbytes(product->src[1]));
        if (given.chosen != nullptr) {
            // Others in every run, since a layer's experts are seldom in a cache.
            std::vector<int32_t> experts(given.chosen, given.chosen + given.rows * given.used);
            for (int32_t & expert : experts) {
                expert = static_cast<int32_t>((expert + left * given.used) % given.experts);
            }
            ggml_backend_tensor_set(product->src[2], experts.data(), 0, ggml_nbytes(product->src[2]));
        }
    };
    const int64_t before = library().products.load();
    const double seconds = compute(context_of_rows.get(), product, threads, repeats, set, out);
    return given.ours && library().products.load() == before ? INFINITY : seconds;
}

bool run_attention(const AttentionCase & given, int threads, float * out) {
    const Context tensors = context();
    const auto tensor = [&](ggml_type type, int64_t n0, int64_t n1, int64_t n2) {
        return ggml_new_tensor_3d(tensors.get(), type, n0, n1, n2);
    };
    ggml_tensor * queries = tensor(GGML_TYPE_F32, given.size, given.rows, given.heads);
    ggml_tensor * mask = tensor(GGML_TYPE_F16, given.cells, given.rows, 1);
    ggml_tensor * cells = tensor(GGML_TYPE_I64, given.cells, 1, 1);
    ggml_tensor * sources[2];
    ggml_tensor * seen[2];
    ggml_tensor * written = nullptr;
    for (int i = 0; i < 2; i++) {
        const int64_t size = i == 0 ? given.size : given.value_size;
        if (i == 0 || given.values != nullptr) {
            const int64_t width = given.key_heads * size;
            ggml_tensor * cache = tensor(given.is_8_bit ? GGML_TYPE_Q8_0 : GGML_TYPE_F16, width, given.cells, 1);
            sources[i] = tensor(GGML_TYPE_F32, width, given.cells, 1);
            written = ggml_set_rows(tensors.get(), cache, sources[i], cells);
        }
        const size_t head = written->nb[1] / static_cast<size_t>(given.key_heads);
        seen[i] = ggml_permute(tensors.get(), ggml_view_3d(tensors.get(), written, size, given.key_heads, given.cells,
                                                           head, written->nb[1], 0), 0, 2, 1, 3);
    }
    ggml_tensor * sinks = given.sinks != nullptr ? tensor(GGML_TYPE_F32, given.heads, 1, 1) : nullptr;
    const auto attended = [&] {
        ggml_tensor * it = ggml_flash_attn_ext(tensors.get(), queries, seen[0], seen[1], mask, given.scale, 0, given.softcap);
        ggml_flash_attn_ext_add_sinks(it, sinks);
        return it;
    };
    // Twice, as layers that share keys and values do; the mean has the same bits.
    ggml_tensor * mean = ggml_scale(tensors.get(), ggml_add(tensors.get(), attended(), attended()), .5F);
    std::vector<int64_t> numbers(static_cast<size_t>(given.cells));
    std::iota(numbers.begin(), numbers.end(), 0);
    Cache cache;
    cache.begin_pass(given.positions, given.cells, nullptr);
    const int64_t before = library().attentions.load();
    Cache * current = std::exchange(library().cache, &cache);
    compute(tensors.get(), mean, threads, 0, [&](int) {
        const auto set = [](ggml_tensor * to, const void * from) { ggml_backend_tensor_set(to, from, 0, ggml_nbytes(to)); };
        set(queries, given.queries);
        set(sources[0], given.keys);
        if (given.values != nullptr) {
            set(sources[1], given.values);
        }
        set(mask, given.mask);
        set(cells, numbers.data());
        if (sinks != nullptr) {
            set(sinks, given.sinks);
        }
    }, out);
    library().cache = current;
    return library().attentions.load() > before;
}

}  // namespace specserve
