// What is asked before a kernel is used: is its result right, and is it faster than what ggml has?

#include <ggml-alloc.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <random>

#include "library.h"

namespace specserve {

namespace {

std::vector<float> normal_numbers(size_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<float> numbers(count);
    for (float & x : numbers) {
        x = normal(generator);
    }
    return numbers;
}

std::vector<uint8_t> quantised(Format format, const std::vector<float> & weights, int64_t k) {
    const auto columns = static_cast<int64_t>(weights.size()) / k;
    std::vector<uint8_t> blocks(static_cast<size_t>(columns) * ggml_row_size(type_of(format), k));
    ggml_quantize_chunk(type_of(format), weights.data(), blocks.data(), 0, columns, k, nullptr);
    return blocks;
}

template <auto destroy> struct Destroy {
    template <class T> void operator()(T * it) const { destroy(it); }
};
using Context = std::unique_ptr<ggml_context, Destroy<ggml_free>>;
using Buffer = std::unique_ptr<ggml_backend_buffer, Destroy<ggml_backend_buffer_free>>;
using Backend = std::unique_ptr<ggml_backend, Destroy<ggml_backend_free>>;

Context context() { return Context(ggml_init({64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})); }

// Where ggml itself would put these weights: into the first of its own extra buffer types that takes them, or as they
// are.
ggml_backend_buffer_type_t stock_buffer_type(Format format, int64_t k, int64_t columns) {
    const ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    for (const ggml_backend_buffer_type_t type : ggml_backend_cpu_get_extra_buffer_types()) {
        if (type == buffer_type()) {
            continue;
        }
        const Context scratch = context();
        ggml_tensor * weights = ggml_new_tensor_2d(scratch.get(), type_of(format), k, columns);
        ggml_tensor * x = ggml_new_tensor_2d(scratch.get(), GGML_TYPE_F32, k, 1);
        const Buffer empty(ggml_backend_buft_alloc_buffer(type, 0));
        weights->buffer = empty.get();
        if (ggml_backend_dev_supports_op(cpu, ggml_mul_mat(scratch.get(), weights, x))) {
            return type;
        }
    }
    return ggml_backend_cpu_buffer_type();
}

}  // namespace

double check_product(const Kernels & kernels, Format format, int rows) {
    constexpr int64_t k = 768;
    const int64_t columns = 2 * kernels.lanes + 3;  // the last panel is not full
    const std::vector<uint8_t> blocks = quantised(format, normal_numbers(static_cast<size_t>(k * columns), 1), k);
    const std::vector<float> x = normal_numbers(static_cast<size_t>(k * rows), 2);

    Weights weights = {format, k, columns, nullptr, library().non_temporal};
    const int64_t panels = (columns + kernels.lanes - 1) / kernels.lanes;
    std::vector<uint8_t> packed(static_cast<size_t>(panels * kernels.panel_bytes(format, k)));
    kernels.pack(weights, blocks.data(), 0, panels, packed.data());
    weights.data = packed.data();
    std::vector<int8_t> values(static_cast<size_t>(k * rows));
    std::vector<float> scales(static_cast<size_t>(scale_words(format, k) * rows));
    std::vector<int32_t> sums(static_cast<size_t>(sum_words(format, k) * rows));
    const Tile tile = {values.data(), scales.data(), sums.data(), rows};
    for (int row = 0; row < rows; row++) {
        kernels.quantise(format, x.data() + row * k, 0, k / block_length(format), tile, row);
    }
    std::vector<float> out(static_cast<size_t>(rows * columns));
    for (int64_t panel = 0; panel < panels; panel++) {
        kernels.multiply(weights, panel, tile, out.data(), columns);
    }

    std::vector<float> column(k);
    double largest = 0;
    double squares = 0;
    for (int64_t c = 0; c < columns; c++) {
        ggml_get_type_traits(type_of(format))->to_float(
            blocks.data() + static_cast<size_t>(c) * ggml_row_size(type_of(format), k), column.data(), k);
        for (int row = 0; row < rows; row++) {
            double exact = 0;
            for (int64_t i = 0; i < k; i++) {
                exact += static_cast<double>(column[static_cast<size_t>(i)]) * x[static_cast<size_t>(row * k + i)];
            }
            const double got = out[static_cast<size_t>(row * columns + c)];
            largest = std::max(largest, std::isfinite(got) ? std::abs(got - exact) : INFINITY);
            squares += exact * exact;
        }
    }
    return largest / std::sqrt(squares / static_cast<double>(rows * columns));
}

double run_product(bool ours, Format format, int64_t k, int64_t columns, const uint8_t * source, int rows,
                   const float * x, int threads, int repeats, float * out) {
    const Context weight_context = context();
    const Context context_of_rows = context();
    ggml_tensor * weights = ggml_new_tensor_2d(weight_context.get(), type_of(format), k, columns);
    const Buffer weight_buffer(ggml_backend_alloc_ctx_tensors_from_buft(
        weight_context.get(), ours ? buffer_type() : stock_buffer_type(format, k, columns)));
    ggml_backend_tensor_set(weights, source, 0, ggml_nbytes(weights));
    ggml_tensor * activations = ggml_new_tensor_2d(context_of_rows.get(), GGML_TYPE_F32, k, rows);
    ggml_tensor * product = ggml_mul_mat(context_of_rows.get(), weights, activations);
    ggml_cgraph * graph = ggml_new_graph(context_of_rows.get());
    ggml_build_forward_expand(graph, product);
    const Buffer rows_buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(context_of_rows.get(), ggml_backend_cpu_buffer_type()));
    ggml_backend_tensor_set(activations, x, 0, ggml_nbytes(activations));

    const Backend backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_backend_cpu_set_n_threads(backend.get(), threads);
    std::vector<double> seconds;
    for (int i = 0; i <= repeats; i++) {
        const auto begin = std::chrono::steady_clock::now();
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            return INFINITY;
        }
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    if (out != nullptr) {
        ggml_backend_tensor_get(product, out, 0, ggml_nbytes(product));
    }
    // The first one warms up; the fastest is what neighbours on the machine disturbed least.
    return repeats > 0 ? *std::min_element(seconds.begin() + 1, seconds.end()) : seconds[0];
}

double time_product(bool ours, Format format, int64_t k, int64_t columns, int rows, int threads, int repeats) {
    // Quantising well takes longer than all else here, so some columns stand for all.
    const std::vector<uint8_t> some = quantised(format, normal_numbers(static_cast<size_t>(k * 16), 1), k);
    std::vector<uint8_t> blocks;
    for (int64_t column = 0; column < columns; column += 16) {
        blocks.insert(blocks.end(), some.begin(), some.end());
    }
    const std::vector<float> x = normal_numbers(static_cast<size_t>(k * rows), 2);
    return run_product(ours, format, k, columns, blocks.data(), rows, x.data(), threads, repeats, nullptr);
}

}  // namespace specserve
