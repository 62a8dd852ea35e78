#include "assistants.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <system_error>
#include <thread>

namespace specserve {

namespace {

// How often somebody looks who waits: an assistant for work before it sleeps, some 20 us, as long as what llama.cpp
// computes between two products; the pass for a piece before it takes it away, about as long as a piece takes.
constexpr int kLooksForWork = 800;
constexpr int kLooksForPiece = 300;

void sleep_while(const std::atomic<uint32_t> & word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t> & word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

int64_t Work::rows() const {
    int64_t rows = 0;
    for (int64_t t = 0; t < n_tiles; t++) {
        rows += tiles[static_cast<size_t>(t)].rows;
    }
    return rows;
}

void Work::compute(int64_t number, float * first, int64_t row_stride) const {
    const int64_t begin = number * piece;
    const int64_t end = std::min(panels, begin + piece);
    int64_t row = 0;
    for (int64_t t = 0; t < n_tiles; t++) {
        const Tile & tile = tiles[static_cast<size_t>(t)];
        // A kernel adds the column of its panel.
        float * out = first + row * row_stride - begin * kernels->lanes;
        for (int64_t panel = begin; panel < end; panel++) {
            kernels->multiply(weights, panel, tile, out, row_stride);
        }
        row += tile.rows;
    }
}

void Work::compute_in_place(int64_t number) const { compute(number, out + number * piece * kernels->lanes, stride); }

struct Assistants::Assistant {
    int32_t core;
    std::atomic<uint32_t> enabled{0};  // a futex
    std::atomic<bool> busy{false};
    Work work{};             // a copy of the work that it takes pieces of
    std::vector<float> own;  // a piece's result
};

Assistants & Assistants::all() {
    // Never destroyed: its threads live as long as the process.
    static auto * it = new Assistants;
    return *it;
}

void Assistants::run_on(const int32_t * cores, int64_t count) {
    enabled_ = 0;
    for (const auto & assistant : assistants_) {
        assistant->enabled.store(0);
    }
    for (int64_t i = 0; i < count; i++) {
        Assistant * found = nullptr;
        for (const auto & assistant : assistants_) {
            found = assistant->core == cores[i] ? assistant.get() : found;
        }
        if (found == nullptr) {
            found = assistants_.emplace_back(std::make_unique<Assistant>()).get();
            found->core = cores[i];
            try {
                std::thread([this, found] { live(*found); }).detach();
            } catch (const std::system_error &) {
                // The process may start no more threads; passes go on without this one.
                assistants_.pop_back();
                continue;
            }
        }
        found->enabled.store(1);
        wake_all(found->enabled);
        enabled_++;
    }
    // Who sleeps for want of work notices that it is not enabled any more.
    wake_all(number_);
}

uint8_t * Assistants::memory(size_t bytes) {
    if (memory_.empty() || memory_.back().size() < bytes) {
        memory_.emplace_back(bytes + bytes / 2);
    }
    return memory_.back().data();
}

// The next piece from one end of the rest of a work; -1 where all are taken, or the work is another.
int64_t Assistants::take(std::atomic<uint64_t> & rest, uint32_t number, bool from_the_front) {
    uint64_t seen = rest.load(std::memory_order_acquire);
    for (;;) {
        const auto first = static_cast<int64_t>(seen >> 16 & 0xffff);
        const auto end = static_cast<int64_t>(seen & 0xffff);
        if (seen >> 32 != number || first >= end) {
            return -1;
        }
        if (rest.compare_exchange_weak(seen, from_the_front ? seen + (1 << 16) : seen - 1, std::memory_order_acq_rel)) {
            return from_the_front ? first : end - 1;
        }
    }
}

void Assistants::compute(const Work & work) {
    const uint32_t number = number_.load(std::memory_order_relaxed) + 1;
    const int64_t pieces = work.pieces();
    for (int64_t piece = 0; piece < pieces; piece++) {
        states_[static_cast<size_t>(piece)].store(state(number, kOpen), std::memory_order_relaxed);
    }
    work_ = work;
    rest_.store(uint64_t{number} << 32 | static_cast<uint64_t>(pieces), std::memory_order_release);
    number_.store(number);
    if (asleep_.load() > 0) {
        wake_all(number_);
    }
    int64_t mine = -1;
    for (int64_t piece = take(rest_, number, true); piece >= 0; piece = take(rest_, number, true)) {
        work.compute_in_place(piece);
        mine = piece;
    }
    // The pieces after these are the assistants'.
    for (int64_t piece = mine + 1; piece < pieces; piece++) {
        std::atomic<uint64_t> & its = states_[static_cast<size_t>(piece)];
        for (int i = 0; i < kLooksForPiece && its.load(std::memory_order_relaxed) == state(number, kOpen); i++) {
            _mm_pause();
        }
        uint64_t open = state(number, kOpen);
        if (its.compare_exchange_strong(open, state(number, kTakenAway), std::memory_order_acq_rel)) {
            work.compute_in_place(piece);
        }
        while (its.load(std::memory_order_acquire) == state(number, kHandedOver)) {
            _mm_pause();  // some kilobytes are being copied
        }
    }
}

void Assistants::wait_idle() const {
    for (const auto & assistant : assistants_) {
        while (assistant->busy.load()) {
            std::this_thread::yield();
        }
    }
}

void Assistants::live(Assistant & self) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(static_cast<size_t>(self.core), &cores);
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
    uint32_t known = number_.load();
    for (;;) {
        while (self.enabled.load() == 0) {
            sleep_while(self.enabled, 0);
        }
        uint32_t number = number_.load(std::memory_order_acquire);
        for (int i = 0; i < kLooksForWork && number == known; i++) {
            _mm_pause();
            number = number_.load(std::memory_order_acquire);
        }
        if (number == known) {
            asleep_.fetch_add(1);
            sleep_while(number_, known);
            asleep_.fetch_sub(1);
            continue;
        }
        known = number;
        help(self, number);
    }
}

void Assistants::help(Assistant & self, uint32_t number) {
    self.busy.store(true);
    // While the number stays the same, so does the work: the pass waits for pieces that are taken.
    self.work = work_;
    std::atomic_thread_fence(std::memory_order_acquire);
    for (int64_t piece = take(rest_, number, false); piece >= 0; piece = take(rest_, number, false)) {
        const Work & work = self.work;
        const int64_t columns = work.piece * work.kernels->lanes;
        const int64_t first = piece * columns;
        const int64_t rows = work.rows();
        self.own.resize(static_cast<size_t>(rows * columns));
        work.compute(piece, self.own.data(), columns);
        std::atomic<uint64_t> & its = states_[static_cast<size_t>(piece)];
        uint64_t open = state(number, kOpen);
        if (its.compare_exchange_strong(open, state(number, kHandedOver), std::memory_order_acq_rel)) {
            const auto bytes = static_cast<size_t>(std::min(columns, work.weights.columns - first)) * sizeof(float);
            for (int64_t row = 0; row < rows; row++) {
                std::memcpy(work.out + row * work.stride + first, self.own.data() + row * columns, bytes);
            }
            its.store(state(number, kComplete), std::memory_order_release);
        }
    }
    self.busy.store(false);
}

}  // namespace specserve
