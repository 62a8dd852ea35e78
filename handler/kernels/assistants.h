// Threads that help with a product while they can, and that nobody waits for: for a core that other processes keep busy.
//
// A thread of a pass that is interrupted holds up all others at the next barrier. An assistant takes pieces of a product
// as well, but it computes each into memory of its own and hands it over when it is complete; if it has been
// interrupted meanwhile, the pass computes the piece again, and the assistant's is thrown away. Both have the same bits.
//
// Passes are helped that run in one thread.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace specserve {

// A product of some tiles of rows, in pieces of some panels: out[row * stride + column].
struct Work {
    static constexpr int64_t kMaxTiles = 32;
    static constexpr int64_t kMaxPieces = 4096;

    const Kernels * kernels;
    Weights weights;
    std::array<Tile, kMaxTiles> tiles;
    int64_t n_tiles;
    int64_t panels;
    int64_t piece;  // panels of a piece; the last one may be smaller
    float * out;
    int64_t stride;

    int64_t pieces() const { return (panels + piece - 1) / piece; }
    int64_t rows() const;

    // Compute a piece into an array that begins with its first column.
    void compute(int64_t number, float * first, int64_t row_stride) const;
    void compute_in_place(int64_t number) const;
};

class Assistants {
  public:
    static Assistants & all();

    // From now on there is one on each of these cores.
    void run_on(const int32_t * cores, int64_t count);

    bool any() const { return enabled_ > 0; }

    // Memory for the activations of the next work, which assistants that are late may read for any length of time.
    uint8_t * memory(size_t bytes);

    // Compute a product together with those who have time.
    void compute(const Work &);

    // Wait until none of them reads weights.
    void wait_idle() const;

  private:
    struct Assistant;

    static int64_t take(std::atomic<uint64_t> & rest, uint32_t number, bool from_the_front);
    void live(Assistant &);
    void help(Assistant &, uint32_t number);

    // A piece belongs to nobody or an assistant, has been taken away from it, is being handed over, or is complete; all
    // that behind the number of the work.
    enum State : uint64_t { kOpen, kTakenAway, kHandedOver, kComplete };
    static uint64_t state(uint32_t number, State s) { return uint64_t{number} << 2 | s; }

    Work work_{};
    std::atomic<uint32_t> number_{0};  // of the work; a futex on which assistants sleep
    std::atomic<uint64_t> rest_{0};    // the number of the work, its first piece that is not taken, and its last one + 1
    std::array<std::atomic<uint64_t>, Work::kMaxPieces> states_{};
    std::atomic<int> asleep_{0};
    int enabled_ = 0;
    std::vector<std::unique_ptr<Assistant>> assistants_;
    std::vector<std::vector<uint8_t>> memory_;
};

}  // namespace specserve
