// Threads that help with a product while they can, and that nobody waits for: on cores that other processes keep busy.
//
// A thread of a pass that is interrupted holds up all others at the next barrier. So beside a busy core passes run in one
// thread, and an assistant on the busy core takes pieces of each product from its end. It computes a piece into memory of
// its own and hands it over when it is complete; where it has been interrupted meanwhile, the pass computes the piece
// itself, and what the assistant computes is thrown away. Both have the same bits.

#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <vector>

#include "activations.h"

namespace specserve {

// A product in pieces of some panels.
struct Work {
    Activations activations;
    int64_t piece;  // panels of a piece; the last one may be smaller
    float * out;    // [rows][columns]

    int64_t pieces() const { return (activations.weights().panels() + piece - 1) / piece; }
    int64_t columns() const { return piece * activations.weights().kernels->lanes; }  // of a piece

    // Computes a piece into an array of rows that begin with the piece's first column.
    void compute(int64_t number, float * first, int64_t row_stride) const;
};

class Assistants {
  public:
    static Assistants & all();

    // From now on there is one on each of these cores.
    void run_on(const int32_t * cores, int64_t count);

    bool any() const { return any_; }

    // Memory for the activations of the next work, which assistants that are late may read for any length of time.
    void * memory(int64_t bytes);

    // Computes a product together with those who have time.
    void compute(Work);

    // Waits until none of them reads weights.
    void wait_idle() const;

  private:
    static constexpr int64_t kMaxPieces = 4096;

    // A piece belongs to nobody, to the pass, or to an assistant, which then hands it over. All that together with the
    // number of the work, so that an assistant that is late finds none.
    enum State : uint64_t { kFree, kOfPass, kOfAssistant, kHandingOver, kComplete };
    static uint64_t state(uint32_t number, State s) { return uint64_t{number} << 3 | s; }

    bool change(int64_t piece, uint32_t number, State from, State to);
    void live(int32_t core, uint32_t generation);
    void help(uint32_t number, std::vector<float> & own);

    Work work_{};
    std::atomic<uint32_t> number_{0};      // of the work
    std::atomic<uint32_t> generation_{0};  // of the assistants: those before it end
    std::array<std::atomic<uint64_t>, kMaxPieces> states_{};
    std::atomic<int> helping_{0};
    bool any_ = false;
    std::deque<std::vector<uint8_t>> memory_;
};

}  // namespace specserve
