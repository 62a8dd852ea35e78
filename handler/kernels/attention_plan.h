// Which rows of a pass attend to which cells, chunk by chunk of positions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "kernels.h"

namespace specserve {

class Plan {
  public:
    // Rows that agree on where a chunk's positions lie, as far as they see them: those of one sequence, and those of all
    // sequences that share the cells of a prefix.
    struct Group {
        int64_t chunk;
        int32_t cells[kChunk];  // by position; -1 where no row sees one
        std::vector<int32_t> rows;
        std::vector<ChunkRow> visible;
    };

    // Rows of a group that are computed together.
    struct Unit {
        const Group * group;
        size_t first;
        int n_rows;
    };

    // `mask` has a half precision number for every row and cell, 0 or minus infinity; `stride` is in bytes.
    void make(const char * mask, size_t stride, int64_t cells, int64_t rows, const std::vector<int32_t> & positions);

    int64_t rows() const { return rows_; }
    int64_t chunks() const { return static_cast<int64_t>(by_chunk_.size()); }
    bool sees(int64_t row, int64_t chunk) const { return sees_[static_cast<size_t>(row * chunks() + chunk)] != 0; }
    const std::vector<Unit> & units() const { return units_; }
    const std::vector<Group *> & groups(int64_t chunk) const { return by_chunk_[static_cast<size_t>(chunk)]; }
    // Of a chunk's first group; null after the last chunk, and where no row sees one of its positions.
    const int32_t * first_cells(int64_t chunk) const {
        return chunk >= chunks() || groups(chunk).empty() ? nullptr : groups(chunk).front()->cells;
    }

  private:
    void add(int64_t row, size_t chunk, const int32_t * cells, const ChunkRow & visible);

    int64_t rows_ = 0;
    std::deque<Group> groups_{};
    std::vector<std::vector<Group *>> by_chunk_{};
    std::vector<uint8_t> sees_{};  // [row][chunk]
    std::vector<Unit> units_{};
};

}  // namespace specserve
