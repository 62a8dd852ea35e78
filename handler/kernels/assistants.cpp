#include "assistants.h"

#include <pthread.h>
#include <sched.h>

#include <cstring>
#include <system_error>
#include <thread>

#include "graph.h"

namespace specserve {

namespace {

// How often somebody looks who waits: an assistant for work before it sleeps, some 20 us, as long as what llama.cpp
// computes between two products; the pass for a piece before it takes it away, about as long as a piece takes.
constexpr int kLooksForWork = 800;
constexpr int kLooksForPiece = 300;

inline void pause() {
#ifdef __aarch64__
    __asm__ volatile("isb");  // takes about as long as x86's pause; yield takes no time
#else
    __builtin_ia32_pause();
#endif
}

template <class Condition> void spin_while(Condition holds, int looks) {
    for (int i = 0; i < looks && holds(); i++) {
        pause();
    }
}

}  // namespace

void Work::compute(int64_t number, float * first, int64_t row_stride) const {
    const int64_t begin = number * piece;
    const int64_t end = std::min(activations.weights().panels(), begin + piece);
    // A kernel adds the column of its panel.
    activations.multiply(begin, end, [](int64_t panel) { return panel; },
                         [&](int64_t row) { return first - number * columns() + row * row_stride; });
}

Assistants & Assistants::all() {
    // Never destroyed: its threads live as long as the process.
    static auto * it = new Assistants;
    return *it;
}

void Assistants::run_on(const int32_t * cores, int64_t count) {
    const uint32_t generation = generation_.fetch_add(1) + 1;
    any_ = count > 0;
    number_.fetch_add(1);  // those of before may sleep
    number_.notify_all();
    try {
        for (int64_t i = 0; i < count; i++) {
            std::thread(&Assistants::live, this, cores[i], generation).detach();
        }
    } catch (const std::system_error &) {
        // The process may start no more threads: passes go on with fewer assistants.
    }
}

void * Assistants::memory(int64_t bytes) {
    const auto size = static_cast<size_t>(bytes) + kAlignment;
    if (memory_.empty() || memory_.back().size() < size) {
        memory_.emplace_back(2 * size);
    }
    return aligned(memory_.back().data());
}

bool Assistants::change(int64_t piece, uint32_t number, State from, State to) {
    uint64_t expected = state(number, from);
    return states_[static_cast<size_t>(piece)].compare_exchange_strong(expected, state(number, to));
}

void Assistants::compute(Work work) {
    const uint32_t number = number_.load(std::memory_order_relaxed) + 1;
    work.piece = std::max(work.piece, (work.activations.weights().panels() + kMaxPieces - 1) / kMaxPieces);
    const int64_t pieces = work.pieces();
    work_ = work;
    for (int64_t piece = 0; piece < pieces; piece++) {
        states_[static_cast<size_t>(piece)].store(state(number, kFree), std::memory_order_release);
    }
    number_.store(number);
    number_.notify_all();
    for (int64_t piece = 0; piece < pieces; piece++) {
        const auto is = [&](State s) { return states_[static_cast<size_t>(piece)].load() == state(number, s); };
        bool is_ours = change(piece, number, kFree, kOfPass);
        if (!is_ours) {
            spin_while([&] { return is(kOfAssistant); }, kLooksForPiece);
            is_ours = change(piece, number, kOfAssistant, kOfPass);
        }
        if (is_ours) {
            work.compute(piece, work.out + piece * work.columns(), work.activations.weights().columns);
        }
        while (is(kHandingOver)) {
            pause();  // some kilobytes are being copied
        }
    }
}

void Assistants::wait_idle() const {
    while (helping_.load() > 0) {
        std::this_thread::yield();
    }
}

void Assistants::live(int32_t core, uint32_t generation) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(static_cast<size_t>(core), &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
    std::vector<float> own;  // a piece's result
    uint32_t known = number_.load();
    for (;;) {
        spin_while([&] { return number_.load(std::memory_order_relaxed) == known; }, kLooksForWork);
        number_.wait(known);
        known = number_.load();
        if (generation_.load() != generation) {
            return;
        }
        helping_.fetch_add(1);
        help(known, own);
        helping_.fetch_sub(1);
    }
}

void Assistants::help(uint32_t number, std::vector<float> & own) {
    // The next work may overwrite what is copied here, but then no piece of this number is free any more: the pass
    // leaves none.
    const Work work = work_;
    for (int64_t piece = std::min(work.pieces(), kMaxPieces) - 1; piece >= 0; piece--) {
        if (!change(piece, number, kFree, kOfAssistant)) {
            continue;
        }
        const int64_t columns = work.columns(), all_columns = work.activations.weights().columns;
        const int64_t first = piece * columns;
        own.resize(static_cast<size_t>(work.activations.rows() * columns));
        work.compute(piece, own.data(), columns);
        if (change(piece, number, kOfAssistant, kHandingOver)) {
            const auto bytes = static_cast<size_t>(std::min(columns, all_columns - first)) * sizeof(float);
            for (int64_t row = 0; row < work.activations.rows(); row++) {
                std::memcpy(work.out + row * all_columns + first, own.data() + row * columns, bytes);
            }
            change(piece, number, kHandingOver, kComplete);
        }
    }
}

}  // namespace specserve
