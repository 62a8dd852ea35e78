// What is asked before a kernel is used: is its result right, and is it faster than what ggml has?

#include <ggml-alloc.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "cache.h"
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

// Computes a graph by the CPU backend, once and some repetitions: `set` writes its inputs, `before` is told the number of
// each repetition, `out` receives the result. Returns their seconds, those of the first run if there are none, and
// infinite ones if the backend failed.
std::vector<double> compute(ggml_context * tensors, ggml_tensor * result, int threads, int repeats,
                            const std::function<void()> & set, float * out,
                            const std::function<void(int)> & before = [](int) {}) {
    ggml_cgraph * graph = ggml_new_graph(tensors);
    ggml_build_forward_expand(graph, result);
    const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(tensors, ggml_backend_cpu_buffer_type()));
    set();
    const Backend backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    ggml_backend_cpu_set_n_threads(backend.get(), threads);
    std::vector<double> seconds;
    for (int i = 0; i <= repeats; i++) {
        before(i - 1);
        const auto begin = std::chrono::steady_clock::now();
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            return std::vector<double>(static_cast<size_t>(std::max(1, repeats)), INFINITY);
        }
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    if (out != nullptr) {
        ggml_backend_tensor_get(result, out, 0, ggml_nbytes(result));
    }
    if (repeats > 0) {
        seconds.erase(seconds.begin());  // it warms up
    }
    return seconds;
}

// What neighbours on the machine disturbed least.
double fastest(const std::vector<double> & seconds) { return *std::min_element(seconds.begin(), seconds.end()); }

// A matrix of random weights: quantising well takes longer than all else here, so some columns stand for all.
std::vector<uint8_t> repeated_columns(Format format, int64_t k, int64_t columns) {
    const std::vector<uint8_t> some = quantised(format, normal_numbers(static_cast<size_t>(k * 16), 1), k);
    std::vector<uint8_t> blocks;
    blocks.reserve(some.size() * static_cast<size_t>(columns / 16));
    for (int64_t column = 0; column < columns; column += 16) {
        blocks.insert(blocks.end(), some.begin(), some.end());
    }
    return blocks;
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
    constexpr int64_t size = 64, cells = 300, key_heads = 2, heads = 6;
    const auto at = [](int64_t i, int64_t j) { return static_cast<size_t>(i * size + j); };
    const std::vector<float> q = normal_numbers(at(heads * rows, 0), 3);
    const std::vector<float> k = normal_numbers(at(key_heads * cells, 0), 4);
    const std::vector<float> v = normal_numbers(at(key_heads * cells, 0), 5);
    // Every third cell belongs to another sequence, and the last ones are later than the first rows.
    const auto sees = [&](int64_t row, int64_t cell) { return cell % 3 != 2 && cell < cells - rows + row + 1; };
    std::vector<int32_t> positions(cells);
    std::vector<uint16_t> mask(static_cast<size_t>(rows * cells));
    for (int64_t cell = 0; cell < cells; cell++) {
        positions[static_cast<size_t>(cell)] = static_cast<int32_t>(cell / 3 * 2 + cell % 3);
        for (int64_t row = 0; row < rows; row++) {
            mask[static_cast<size_t>(row * cells + cell)] = sees(row, cell) ? 0 : 0xfc00;
        }
    }
    const AttentionCase given{size,     cells,    key_heads, heads,    rows, 1 / std::sqrt(static_cast<float>(size)),
                              q.data(), k.data(), v.data(),  positions.data(), mask.data(), false};
    std::vector<float> out(at(heads * rows, 0));
    const bool ours = run_attention(given, threads, out.data());

    Deviation deviation;
    std::vector<double> exact(size);
    for (int64_t head = 0; head < heads; head++) {
        const int64_t key_head = head / (heads / key_heads);
        for (int64_t row = 0; row < rows; row++) {
            double sum = 0;
            std::fill(exact.begin(), exact.end(), 0);
            for (int64_t cell = 0; cell < cells; cell++) {
                double score = 0;
                for (int64_t i = 0; i < size; i++) {
                    score += static_cast<double>(k[at(cell * key_heads + key_head, i)]) * q[at(head * rows + row, i)];
                }
                const double weight = sees(row, cell) ? std::exp(score * given.scale) : 0;
                sum += weight;
                for (int64_t i = 0; i < size; i++) {
                    exact[static_cast<size_t>(i)] += weight * v[at(cell * key_heads + key_head, i)];
                }
            }
            for (int64_t i = 0; i < size; i++) {
                deviation.add(out[at(row * heads + head, i)], exact[static_cast<size_t>(i)] / sum);
            }
        }
    }
    return ours ? deviation.largest() : INFINITY;
}

bool run_attention(const AttentionCase & given, int threads, float * out) {
    const Context tensors = context();
    const auto tensor = [&](ggml_type type, int64_t n0, int64_t n1, int64_t n2) {
        return ggml_new_tensor_3d(tensors.get(), type, n0, n1, n2);
    };
    const int64_t width = given.key_heads * given.size;
    ggml_tensor * queries = tensor(GGML_TYPE_F32, given.size, given.rows, given.heads);
    ggml_tensor * mask = tensor(GGML_TYPE_F16, given.cells, given.rows, 1);
    ggml_tensor * cells = tensor(GGML_TYPE_I64, given.cells, 1, 1);
    ggml_tensor * sources[2];
    ggml_tensor * seen[2];
    for (int i = 0; i < 2; i++) {
        ggml_tensor * cache = tensor(given.is_8_bit ? GGML_TYPE_Q8_0 : GGML_TYPE_F16, width, given.cells, 1);
        sources[i] = tensor(GGML_TYPE_F32, width, given.cells, 1);
        ggml_tensor * written = ggml_set_rows(tensors.get(), cache, sources[i], cells);
        const size_t head = ggml_row_size(cache->type, given.size);
        seen[i] = ggml_permute(tensors.get(), ggml_view_3d(tensors.get(), written, given.size, given.key_heads,
                                                           given.cells, head, written->nb[1], 0), 0, 2, 1, 3);
    }
    ggml_tensor * attended =
        ggml_flash_attn_ext(tensors.get(), queries, seen[0], seen[1], mask, given.scale, 0, 0);
    std::vector<int64_t> numbers(static_cast<size_t>(given.cells));
    std::iota(numbers.begin(), numbers.end(), 0);
    Cache cache;
    cache.begin_pass(given.positions, given.cells, nullptr);
    const int64_t before = library().attentions.load();
    Cache * current = std::exchange(library().cache, &cache);
    compute(tensors.get(), attended, threads, 0, [&] {
        const auto set = [](ggml_tensor * to, const void * from) { ggml_backend_tensor_set(to, from, 0, ggml_nbytes(to)); };
        set(queries, given.queries);
        set(sources[0], given.keys);
        set(sources[1], given.values);
        set(mask, given.mask);
        set(cells, numbers.data());
    }, out);
    library().cache = current;
    return library().attentions.load() > before;
}

namespace {

std::vector<double> product_seconds(bool ours, Format format, int64_t k, int64_t columns, const uint8_t * source,
                                    int pieces, int rows, const float * x, int threads, int repeats, float * out,
                                    const std::function<void(int)> & before = [](int) {}) {
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
    return compute(context_of_rows.get(), product, threads, repeats, set, out, before);
}

}  // namespace

double run_product(bool ours, Format format, int64_t k, int64_t columns, const uint8_t * source, int pieces, int rows,
                   const float * x, int threads, int repeats, float * out) {
    return fastest(product_seconds(ours, format, k, columns, source, pieces, rows, x, threads, repeats, out));
}

double time_product(bool ours, Format format, int64_t k, int64_t columns, int rows, int threads, int repeats) {
    const std::vector<uint8_t> blocks = repeated_columns(format, k, columns);
    const std::vector<float> x = normal_numbers(static_cast<size_t>(k * rows), 2);
    return run_product(ours, format, k, columns, blocks.data(), 1, rows, x.data(), threads, repeats, nullptr);
}

void time_prefetch(Format format, int64_t k, int64_t columns, int rows, int threads, int turns, const Prefetch * ways,
                   int count, double * seconds) {
    std::vector<uint8_t> blocks = repeated_columns(format, k, columns);
    const std::vector<float> x = normal_numbers(static_cast<size_t>(k * rows), 2);
    Prefetch & used = library().prefetch[rows > kFewRows];
    const Prefetch kept = used;
    const std::vector<double> all =
        product_seconds(true, format, k, columns, blocks.data(), 1, rows, x.data(), threads, turns * count, nullptr,
                        [&](int i) {
                            // They are packed by now.
                            std::vector<uint8_t>().swap(blocks);
                            used = i < 0 ? kept : ways[i % count];
                        });
    used = kept;
    std::copy(all.begin(), all.end(), seconds);
}

}  // namespace specserve
