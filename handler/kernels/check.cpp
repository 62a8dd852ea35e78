// What is asked before a kernel is used: is its result right, and is it faster than what ggml has?

#include <ggml-alloc.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

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

// Computes a graph by the CPU backend, once and some repetitions: `set` writes its inputs, `out` receives its result.
// Returns the seconds of the fastest repetition, infinite if the backend failed.
double compute(ggml_context * tensors, ggml_tensor * result, int threads, int repeats,
               const std::function<void()> & set, float * out) {
    ggml_cgraph * graph = ggml_new_graph(tensors);
    ggml_build_forward_expand(graph, result);
    const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(tensors, ggml_backend_cpu_buffer_type()));
    set();
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
        ggml_backend_tensor_get(result, out, 0, ggml_nbytes(result));
    }
    // The first one warms up; the fastest is what neighbours on the machine disturbed least.
    return repeats > 0 ? *std::min_element(seconds.begin() + 1, seconds.end()) : seconds[0];
}

// The largest difference from exact results, in parts of their root mean square.
class Deviation {
  public:
    void add(double got, double exact) {
        largest_ = std::max(largest_, std::isfinite(got) ? std::abs(got - exact) : INFINITY);
        squares_ += exact * exact;
        count_++;
    }

    double largest() const { return largest_ / std::sqrt(squares_ / count_); }

  private:
    double largest_ = 0;
    double squares_ = 0;
    double count_ = 0;
};

}  // namespace

double check_product(Format format, int rows, int threads) {
    constexpr int64_t k = 768;
    const int64_t columns = 2 * library().kernels->lanes + 3;  // the last panel is not full
    const std::vector<uint8_t> blocks = quantised(format, normal_numbers(static_cast<size_t>(k * columns), 1), k);
    const std::vector<float> x = normal_numbers(static_cast<size_t>(k * rows), 2);
    std::vector<float> out(static_cast<size_t>(rows * columns));
    const int64_t before = library().products.load();
    run_product(true, format, k, columns, blocks.data(), 1, rows, x.data(), threads, 0, out.data());

    std::vector<float> column(k);
    Deviation deviation;
    for (int64_t c = 0; c < columns; c++) {
        ggml_get_type_traits(type_of(format))->to_float(
            blocks.data() + static_cast<size_t>(c) * ggml_row_size(type_of(format), k), column.data(), k);
        for (int row = 0; row < rows; row++) {
            double exact = 0;
            for (int64_t i = 0; i < k; i++) {
                exact += static_cast<double>(column[static_cast<size_t>(i)]) * x[static_cast<size_t>(row * k + i)];
            }
            deviation.add(out[static_cast<size_t>(row * columns + c)], exact);
        }
    }
    return library().products.load() == before ? INFINITY : deviation.largest();
}

double check_attention(int rows, int threads) {
    constexpr int64_t size = 64, cells = 40, key_heads = 2, heads = 6;
    const float scale = 1 / std::sqrt(static_cast<float>(size));
    const std::vector<float> q = normal_numbers(static_cast<size_t>(heads * rows * size), 3);
    const auto halves = [](const std::vector<float> & numbers) {
        std::vector<ggml_fp16_t> half(numbers.size());
        ggml_fp32_to_fp16_row(numbers.data(), half.data(), static_cast<int64_t>(numbers.size()));
        return half;
    };
    const auto at = [](int64_t i, int64_t j) { return static_cast<size_t>(i * size + j); };
    const std::vector<ggml_fp16_t> k = halves(normal_numbers(at(key_heads * cells, 0), 4));
    const std::vector<ggml_fp16_t> v = halves(normal_numbers(at(key_heads * cells, 0), 5));
    // Every third cell belongs to another sequence, and the last ones are later than the first rows.
    const auto sees = [&](int64_t row, int64_t cell) { return cell % 3 != 2 && cell < cells - rows + row + 1; };
    std::vector<float> mask(static_cast<size_t>(rows * cells));
    for (int64_t i = 0; i < rows * cells; i++) {
        mask[static_cast<size_t>(i)] = sees(i / cells, i % cells) ? 0 : -INFINITY;
    }

    const Context tensors = context();
    const auto tensor = [&](ggml_type type, int64_t n0, int64_t n1, int64_t n2) {
        return ggml_new_tensor_3d(tensors.get(), type, n0, n1, n2);
    };
    ggml_tensor * queries = tensor(GGML_TYPE_F32, size, rows, heads);
    ggml_tensor * keys = tensor(GGML_TYPE_F16, size, cells, key_heads);
    ggml_tensor * values = tensor(GGML_TYPE_F16, size, cells, key_heads);
    ggml_tensor * visible = tensor(GGML_TYPE_F16, cells, rows, 1);
    ggml_tensor * attended = ggml_flash_attn_ext(tensors.get(), queries, keys, values, visible, scale, 0, 0);
    std::vector<float> out(static_cast<size_t>(ggml_nelements(attended)));
    const int64_t before = library().attentions.load();
    // Attention is ours while any format is.
    const unsigned formats = std::exchange(library().formats, 1U);
    compute(tensors.get(), attended, threads, 0, [&] {
        ggml_backend_tensor_set(queries, q.data(), 0, ggml_nbytes(queries));
        ggml_backend_tensor_set(keys, k.data(), 0, ggml_nbytes(keys));
        ggml_backend_tensor_set(values, v.data(), 0, ggml_nbytes(values));
        ggml_backend_tensor_set(visible, halves(mask).data(), 0, ggml_nbytes(visible));
    }, out.data());
    library().formats = formats;

    Deviation deviation;
    std::vector<double> exact(size);
    for (int64_t head = 0; head < heads; head++) {
        const int64_t first = head / (heads / key_heads) * cells;
        for (int64_t row = 0; row < rows; row++) {
            double sum = 0;
            std::fill(exact.begin(), exact.end(), 0);
            for (int64_t cell = 0; cell < cells; cell++) {
                double score = 0;
                for (int64_t i = 0; i < size; i++) {
                    const double key = ggml_fp16_to_fp32(k[at(first + cell, i)]);
                    score += key * q[at(head * rows + row, i)];
                }
                const double weight = sees(row, cell) ? std::exp(score * scale) : 0;
                sum += weight;
                for (int64_t i = 0; i < size; i++) {
                    exact[static_cast<size_t>(i)] += weight * ggml_fp16_to_fp32(v[at(first + cell, i)]);
                }
            }
            for (int64_t i = 0; i < size; i++) {
                deviation.add(out[at(row * heads + head, i)], exact[static_cast<size_t>(i)] / sum);
            }
        }
    }
    return library().attentions.load() == before ? INFINITY : deviation.largest();
}

double run_product(bool ours, Format format, int64_t k, int64_t columns, const uint8_t * source, int pieces, int rows,
                   const float * x, int threads, int repeats, float * out) {
    const Context weight_context = context();
    const Context context_of_rows = context();
    ggml_tensor * weights = ggml_new_tensor_2d(weight_context.get(), type_of(format), k, columns);
    const Buffer weight_buffer(ggml_backend_alloc_ctx_tensors_from_buft(
        weight_context.get(), ours ? buffer_type() : stock_buffer_type(format, k, columns)));
    for (size_t piece = 0, size = ggml_nbytes(weights), n = static_cast<size_t>(pieces); piece < n; piece++) {
        const size_t begin = size * piece / n;
        ggml_backend_tensor_set(weights, source + begin, begin, size * (piece + 1) / n - begin);
    }
    ggml_tensor * activations = ggml_new_tensor_2d(context_of_rows.get(), GGML_TYPE_F32, k, rows);
    ggml_tensor * product = ggml_mul_mat(context_of_rows.get(), weights, activations);
    const auto set = [&] { ggml_backend_tensor_set(activations, x, 0, ggml_nbytes(activations)); };
    return compute(context_of_rows.get(), product, threads, repeats, set, out);
}

double time_product(bool ours, Format format, int64_t k, int64_t columns, int rows, int threads, int repeats) {
    // Quantising well takes longer than all else here, so some columns stand for all.
    const std::vector<uint8_t> some = quantised(format, normal_numbers(static_cast<size_t>(k * 16), 1), k);
    std::vector<uint8_t> blocks;
    for (int64_t column = 0; column < columns; column += 16) {
        blocks.insert(blocks.end(), some.begin(), some.end());
    }
    const std::vector<float> x = normal_numbers(static_cast<size_t>(k * rows), 2);
    return run_product(ours, format, k, columns, blocks.data(), 1, rows, x.data(), threads, repeats, nullptr);
}

}  // namespace specserve
