// Packing: each sample once, no row beyond its capacity, and close to the minimum number of rows.
#include <algorithm>

#include "../llmc/core/rng.h"
#include "../llmc/data/packing.h"
#include "errors.h"

using Rows = std::vector<std::vector<size_t>>;

static std::vector<size_t> random_lengths(size_t n, size_t capacity, uint32_t stream) {
    const Random random{1, Purpose::test, stream};
    std::vector<size_t> lengths(n);
    for (size_t i = 0; i < n; i++) {
        const double u = random.uniform(i);  // every other list is mostly short, like documents
        lengths[i] = 1 + size_t((stream % 2 ? u : u * u * u) * double(capacity - 1));
    }
    return lengths;
}

TEST(Packing, ByHand) {
    const std::vector<size_t> lengths = {2, 5, 4, 7, 1, 3, 8};
    EXPECT_EQ(pack_best_fit(lengths, 10), (Rows{{6, 0}, {3, 5}, {1, 2, 4}}));
    EXPECT_EQ(pack_best_fit(std::vector<size_t>{3, 3, 3, 3}, 6), (Rows{{0, 1}, {2, 3}}));   // equal lengths: by index
    EXPECT_EQ(pack_best_fit(std::vector<size_t>{6, 6, 4, 4}, 10), (Rows{{0, 2}, {1, 3}}));  // equally full: the older row
    EXPECT_EQ(pack_best_fit(std::vector<size_t>{6, 7, 3}, 10), (Rows{{1, 2}, {0}}));        // the fullest row with room
    EXPECT_EQ(pack_best_fit(std::vector<size_t>{10, 10}, 10), (Rows{{0}, {1}}));
    EXPECT_EQ(pack_best_fit(std::vector<size_t>{}, 10), Rows{});
}

TEST(Packing, EachSampleOnceInFewRows) {
    for (uint32_t list = 0; list < 40; list++) {
        const size_t capacity = 50 + 37 * list;
        const auto lengths = random_lengths(1 + 97 * list, capacity, list);
        const auto rows = pack_best_fit(lengths, capacity);
        std::vector<int> seen(lengths.size());
        size_t tokens = 0, over_half = 0;
        for (const auto &row : rows) {
            size_t used = 0;
            for (size_t i : row) used += lengths.at(i), seen.at(i)++;
            EXPECT_LE(used, capacity);
            EXPECT_FALSE(row.empty());
            tokens += used;
        }
        for (size_t i = 0; i < lengths.size(); i++) EXPECT_EQ(seen[i], 1) << "sample " << i;
        for (size_t length : lengths) over_half += 2 * length > capacity;
        const size_t least = std::max(ceil_div(tokens, capacity), over_half);  // no packing has fewer rows
        EXPECT_LE(9 * rows.size(), 11 * least + 9) << "list " << list;
        EXPECT_EQ(rows, pack_best_fit(lengths, capacity));
    }
}

TEST(Packing, SampleLongerThanARowIsRefused) {
    const auto message = error_of([] { pack_best_fit(std::vector<size_t>{3, 12, 11}, 10); });
    expect_contains(message, {"sample 1 ", "12 tokens", "holds 10", "\n  fix: --row_tokens 12", "--max_len 10"});
}
