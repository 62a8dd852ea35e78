#include "attention_plan.h"

#include <algorithm>
#include <cstring>

namespace specserve {

namespace {

// Whether rows that see these cells of a chunk agree on where its positions lie.
bool agree(const int32_t * some, const int32_t * others) {
    int differ = 0;
    for (int i = 0; i < kChunk; i++) {
        differ |= static_cast<int>(some[i] != others[i]) & ~((some[i] | others[i]) >> 31);
    }
    return (differ & 1) == 0;
}

// Calls seen(cell) for every cell of a row that is not minus infinity.
template <class Seen> void for_visible_cells(const char * mask, int64_t cells, Seen seen) {
    constexpr uint64_t hidden = 0x8000800080008000;
    int64_t cell = 0;
    for (; cell + 4 <= cells; cell += 4) {
        uint64_t four;
        std::memcpy(&four, mask + 2 * cell, sizeof four);
        if ((four & hidden) == hidden) {
            continue;
        }
        for (int i = 0; i < 4; i++) {
            if ((four >> (16 * i) & 0x8000) == 0) {
                seen(cell + i);
            }
        }
    }
    for (; cell < cells; cell++) {
        uint16_t one;
        std::memcpy(&one, mask + 2 * cell, sizeof one);
        if (one >> 15 == 0) {
            seen(cell);
        }
    }
}

}  // namespace

void Plan::make(const char * mask, size_t stride, int64_t cells, int64_t rows, const std::vector<int32_t> & positions) {
    rows_ = rows;
    groups_.clear();
    by_chunk_.clear();
    units_.clear();
    std::vector<int32_t> of_row;  // a row's cells by position
    std::vector<ChunkRow> visible;
    for (int64_t row = 0; row < rows; row++) {
        std::fill(of_row.begin(), of_row.end(), -1);
        std::fill(visible.begin(), visible.end(), ChunkRow{});
        for_visible_cells(mask + static_cast<size_t>(row) * stride, cells, [&](int64_t cell) {
            const auto position = static_cast<size_t>(positions[static_cast<size_t>(cell)]);
            const size_t chunk = position / kChunk;
            if (chunk >= visible.size()) {
                of_row.resize((chunk + 1) * kChunk, -1);
                visible.resize(chunk + 1);
            }
            of_row[position] = static_cast<int32_t>(cell);
            visible[chunk].visible[position / kBlock % kBlocks] |= uint64_t{1} << position % kBlock;
        });
        if (visible.empty()) {
            of_row.resize(kChunk, -1);
            visible.resize(1);
        }
        bool sees_any = false;
        for (size_t chunk = 0; chunk < visible.size(); chunk++) {
            const uint64_t * words = visible[chunk].visible;
            if (std::any_of(words, words + kBlocks, [](uint64_t word) { return word != 0; })) {
                add(row, chunk, of_row.data() + chunk * kChunk, visible[chunk]);
                sees_any = true;
            }
        }
        if (!sees_any) {
            add(row, 0, of_row.data(), visible[0]);
        }
    }

    sees_.assign(static_cast<size_t>(rows * chunks()), 0);
    for (const auto & groups : by_chunk_) {
        for (const Group * group : groups) {
            for (const int32_t row : group->rows) {
                sees_[static_cast<size_t>(row * chunks() + group->chunk)] = 1;
            }
            const size_t count = group->rows.size();
            const size_t tiles = (count + kMaxRows - 1) / kMaxRows;
            for (size_t tile = 0; tile < tiles; tile++) {
                const size_t first = count * tile / tiles;
                units_.push_back({group, first, static_cast<int>(count * (tile + 1) / tiles - first)});
            }
        }
    }
}

void Plan::add(int64_t row, size_t chunk, const int32_t * cells, const ChunkRow & visible) {
    if (chunk >= by_chunk_.size()) {
        by_chunk_.resize(chunk + 1);
    }
    Group * found = nullptr;
    for (Group * group : by_chunk_[chunk]) {
        if (agree(group->cells, cells)) {
            found = group;
            break;
        }
    }
    if (found == nullptr) {
        found = &groups_.emplace_back();
        found->chunk = static_cast<int64_t>(chunk);
        std::fill(found->cells, found->cells + kChunk, -1);
        by_chunk_[chunk].push_back(found);
    }
    for (int i = 0; i < kChunk; i++) {
        found->cells[i] = std::max(found->cells[i], cells[i]);
    }
    found->rows.push_back(static_cast<int32_t>(row));
    found->visible.push_back(visible);
}

}  // namespace specserve
