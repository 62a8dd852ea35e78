// What this machine could do at most: bytes read from memory, and products of bytes, a second.
//
// A pass reads every weight once and multiplies it once a row, so these two figures bound its time from below.
// Each is the best of some short runs of all threads at once, since neighbours can only make a run slower. roof.py
// builds this and calls it.

#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRuns = 15;

// Calls prepare(thread), then work(thread) in all threads at once, kRuns + 1 times, of which the first warms up.
// Returns the seconds of the fastest run, from the first thread's start to the last one's end.
double fastest_run(int threads, const std::function<void(int)> & prepare, const std::function<void(int)> & work) {
    std::vector<Clock::time_point> begin(static_cast<size_t>(threads) * (kRuns + 1));
    std::vector<Clock::time_point> end(begin.size());
    std::atomic<int> arrived{0};
    const auto body = [&](int thread) {
        prepare(thread);
        for (int run = 0; run <= kRuns; run++) {
            arrived.fetch_add(1);
            while (arrived.load() < threads * (run + 1)) {
                std::this_thread::yield();
            }
            const auto at = static_cast<size_t>(run * threads + thread);
            begin[at] = Clock::now();
            work(thread);
            end[at] = Clock::now();
        }
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; thread++) {
        others.emplace_back(body, thread);
    }
    body(0);
    for (std::thread & other : others) {
        other.join();
    }
    double fastest = INFINITY;
    for (int run = 1; run <= kRuns; run++) {
        const auto first = begin.begin() + run * threads;
        const auto last = end.begin() + run * threads;
        const auto span = *std::max_element(last, last + threads) - *std::min_element(first, first + threads);
        fastest = std::min(fastest, std::chrono::duration<double>(span).count());
    }
    return fastest;
}

// ---- memory ----

// Bytes each thread reads in a run: several times any last-level cache that a thread's share of a machine comes with.
constexpr int64_t kReadBytes = int64_t{256} << 20;
constexpr int64_t kAhead = 2048;  // bytes from a load to its prefetch

// Reads `bytes` (a multiple of 256) from p on.
#ifdef __aarch64__
void read_all(const uint8_t * p, int64_t bytes) {
    uint8x16_t sums[16] = {};
    for (int64_t i = 0; i < bytes; i += 256) {
        for (int line = 0; line < 4; line++) {
            __builtin_prefetch(p + i + kAhead + 64 * line);
        }
        for (int part = 0; part < 16; part++) {
            sums[part] = veorq_u8(sums[part], vld1q_u8(p + i + 16 * part));
        }
    }
    for (const uint8x16_t & sum : sums) {
        asm volatile("" : : "w"(sum));
    }
}
#else
__attribute__((target("avx2"))) void read_all(const uint8_t * p, int64_t bytes) {
    __m256i sums[8] = {};
    for (int64_t i = 0; i < bytes; i += 256) {
        for (int line = 0; line < 4; line++) {
            _mm_prefetch(reinterpret_cast<const char *>(p + i + kAhead + 64 * line), _MM_HINT_T0);
        }
        for (int part = 0; part < 8; part++) {
            const auto * from = reinterpret_cast<const __m256i *>(p + i + 32 * part);
            sums[part] = _mm256_xor_si256(sums[part], _mm256_loadu_si256(from));
        }
    }
    for (const __m256i & sum : sums) {
        asm volatile("" : : "x"(sum));  // used, so that no load is left out
    }
}
#endif

// ---- products ----

// A thread's steps in a run (1.6 ms at 3 GHz and an instruction a cycle), and how many independent sums hide an
// instruction's latency of 4 or 5 cycles, with two of them a cycle.
constexpr int64_t kSteps = 400'000;
constexpr int kSums = 12;

// Keeps a value in a register and the compiler from knowing it.
#define OPAQUE(x) asm volatile("" : "+x"(x))

// Each of these does kSteps x kSums instructions that multiply a register of weights by one of activations, and what
// else their variant needs for it.

#ifdef __aarch64__

#define NEON_DOT(name, instructions, product)                                   \
    __attribute__((target("arch=" instructions))) void name() {                 \
        int32x4_t sums[kSums] = {};                                             \
        for (int32x4_t & sum : sums) {                                          \
            asm volatile("" : "+w"(sum));                                       \
        }                                                                       \
        int8x16_t weights = vdupq_n_s8(15);                                     \
        int8x16_t activations = vdupq_n_s8(127);                                \
        for (int64_t step = 0; step < kSteps; step++) {                         \
            asm volatile("" : "+w"(weights), "+w"(activations));                \
            _Pragma("GCC unroll 16") for (int32x4_t & sum : sums) {             \
                sum = product;                                                  \
            }                                                                   \
        }                                                                       \
        for (const int32x4_t & sum : sums) {                                    \
            asm volatile("" : : "w"(sum));                                      \
        }                                                                       \
    }
NEON_DOT(dot_i8mm, "armv8.2-a+i8mm", vmmlaq_s32(sum, weights, activations))
NEON_DOT(dot_asimddp, "armv8.2-a+dotprod", vdotq_s32(sum, weights, activations))

// Kept from being computed once for all sums.
inline int16x8_t products(int8x16_t weights, int8x16_t activations) {
    asm volatile("" : "+w"(activations));
    return vmlal_high_s8(vmull_s8(vget_low_s8(weights), vget_low_s8(activations)), weights, activations);
}
NEON_DOT(dot_asimd, "armv8-a", vpadalq_s16(sum, products(weights, activations)))

#else

__attribute__((target("avx512f,avx512vnni"))) void dot_avx512_vnni() {
    __m512i sums[kSums] = {};
    for (__m512i & sum : sums) {
        asm volatile("" : "+v"(sum));  // else the compiler sees that all are equal, and computes one
    }
    __m512i weights = _mm512_set1_epi8(15);
    __m512i activations = _mm512_set1_epi8(127);
    for (int64_t step = 0; step < kSteps; step++) {
        asm volatile("" : "+v"(weights), "+v"(activations));
        _Pragma("GCC unroll 16") for (__m512i & sum : sums) {
            sum = _mm512_dpbusd_epi32(sum, weights, activations);
        }
    }
    for (const __m512i & sum : sums) {
        asm volatile("" : : "v"(sum));
    }
}

__attribute__((target("avx2,avxvnni"))) void dot_avx_vnni() {
    __m256i sums[kSums] = {};
    for (__m256i & sum : sums) {
        OPAQUE(sum);
    }
    __m256i weights = _mm256_set1_epi8(15);
    __m256i activations = _mm256_set1_epi8(127);
    for (int64_t step = 0; step < kSteps; step++) {
        OPAQUE(weights);
        OPAQUE(activations);
        _Pragma("GCC unroll 16") for (__m256i & sum : sums) {
            sum = _mm256_dpbusd_avx_epi32(sum, weights, activations);
        }
    }
    for (const __m256i & sum : sums) {
        asm volatile("" : : "x"(sum));
    }
}

// Pairs of products of a 4-bit weight and a byte add up to 16 bits; eight such sums fit (handler/kernels/multiply_avx2.h)
// before they are widened to 32 bits.
constexpr int kPairs = 8;

__attribute__((target("avx2"))) void dot_avx2() {
    static_assert(kSteps % kPairs == 0, "whole groups");
    __m256i sums[kSums] = {};
    for (__m256i & sum : sums) {
        OPAQUE(sum);
    }
    __m256i weights = _mm256_set1_epi8(15);
    __m256i activations = _mm256_set1_epi8(127);
    __m256i ones = _mm256_set1_epi16(1);
    for (int64_t step = 0; step < kSteps; step += kPairs) {
        _Pragma("GCC unroll 16") for (__m256i & sum : sums) {
            OPAQUE(weights);
            __m256i pairs = _mm256_maddubs_epi16(weights, activations);
            _Pragma("GCC unroll 16") for (int pair = 1; pair < kPairs; pair++) {
                OPAQUE(activations);
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights, activations));
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
    }
    for (const __m256i & sum : sums) {
        asm volatile("" : : "x"(sum));
    }
}

#endif

// The variants of our kernels: what their dot product is, and how many products it makes.
struct Dot {
    const char * variant;
    void (*run)();
    int64_t products;
};

constexpr Dot kDots[] = {
#ifdef __aarch64__
    {"i8mm", dot_i8mm, kSteps * kSums * 32},
    {"asimddp", dot_asimddp, kSteps * kSums * 16},
    {"asimd", dot_asimd, kSteps * kSums * 16},
#else
    {"avx512_vnni", dot_avx512_vnni, kSteps * kSums * 64},
    {"avx_vnni", dot_avx_vnni, kSteps * kSums * 32},
    {"avx2", dot_avx2, kSteps * kSums * 32},
#endif
};

}  // namespace

// Bytes that `threads` threads read from memory together, a second.
extern "C" double read_bandwidth(int threads) {
    std::vector<std::unique_ptr<uint8_t[]>> blocks(static_cast<size_t>(threads));
    const auto fill = [&](int thread) {
        auto & block = blocks[static_cast<size_t>(thread)];
        // Written, since pages that never were are all the same page of zeros; the end is for prefetches.
        block.reset(new uint8_t[kReadBytes + kAhead + 256]);
        std::fill_n(block.get(), kReadBytes, static_cast<uint8_t>(thread + 1));
    };
    const auto read = [&](int thread) { read_all(blocks[static_cast<size_t>(thread)].get(), kReadBytes); };
    return static_cast<double>(threads * kReadBytes) / fastest_run(threads, fill, read);
}

// Products of a weight and an activation that `threads` threads can do together by the instructions of a variant, a
// second: nothing is unpacked, loaded or scaled. Not a number for a variant that is not known.
extern "C" double dot_peak(int threads, const char * variant) {
    for (const Dot & dot : kDots) {
        if (std::strcmp(variant, dot.variant) == 0) {
            const double seconds = fastest_run(threads, [](int) {}, [&](int) { dot.run(); });
            return static_cast<double>(threads * dot.products) / seconds;
        }
    }
    return NAN;
}
