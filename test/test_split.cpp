// mesh.h and split.h: groups of ranks, layouts of a row over a ring, and the choice of a layout.
#include "../llmc/parallel/split.h"

#include <limits>

#include "../llmc/parallel/mesh.h"
#include "check.h"
#include "errors.h"
#include "reference_attention.h"

static const double infinity = std::numeric_limits<double>::infinity();
static const LayerKind full_layers[] = {{0, 32}};

// Attention of Llama 3 8B in bf16 at 400 TFLOP/s.
static AttentionCost cost_of_8b(double bandwidth) { return {32, 8, 128, 2, 400e12, bandwidth}; }

// ---- mesh

TEST(Mesh, MessageNamesSizesThatDivide) {
    SelfComm one;
    EXPECT_EQ(Mesh(one, 1).ring->size, 1);
    const auto expect = [](const char *flag, int size, int ring, int group, const char *sizes, int experts = 1) {
        const std::string said =
            error_of([&] { run_threads(12, {}, [&](Comm &world) { return Mesh(world, ring, group, experts).dp; }); });
        expect_contains(said, {format("--%s %d does not divide 12 ranks", flag, size), std::string("fix: use one of ") + sizes});
    };
    for (int size : {0, -1, 5, 24}) expect("ring_attn_size", size, size, 0, "1, 2, 3, 4, 6, 12");
    for (int size : {-1, 5, 24}) expect("zero_group", size, 1, size, "2, 3, 4, 6, 12");
    for (int size : {0, 5, 24}) expect("expert_parallel", size, 1, 0, "1, 2, 3, 4, 6, 12", size);
}

// Eight ranks in rings of two and groups of four: 0 1 | 2 3 || 4 5 | 6 7. Experts are divided within a ring, so ranks 5 and 7 have the same
// ones. The replicas of rank 3 are 3 and 7.
TEST(Mesh, GroupsAreNeighboursAndReplicasTheSameRanksOfOthers) {
    run_threads(8, {}, [](Comm &world) {
        const Mesh mesh(world, 2, 4, 2), one(world, 1, 8);
        using Members = std::vector<int>;
        const int r = world.rank, pair = r / 2 * 2, column = r / 4 * 4 + r % 2;
        EXPECT_EQ(mesh.ring->gather(r), (Members{pair, pair + 1}));
        EXPECT_EQ((Members{mesh.dp, mesh.sp, mesh.dp_rank, mesh.sp_rank}), (Members{4, 2, r / 2, r % 2}));
        EXPECT_EQ(mesh.shards.group.gather(r), (Members{r / 4 * 4, r / 4 * 4 + 1, r / 4 * 4 + 2, r / 4 * 4 + 3}));
        EXPECT_EQ(mesh.shards.replicas->gather(r), (Members{r % 4, r % 4 + 4}));
        EXPECT_EQ(mesh.shards.rank(), size_t(r));
        EXPECT_EQ(mesh.shards.experts->gather(r), (Members{pair, pair + 1}));
        EXPECT_EQ(mesh.shards.same_experts->gather(r), (Members{column, column + 2}));
        EXPECT_EQ(&mesh.shards.of(Holders::same_experts), mesh.shards.same_experts);
        EXPECT_EQ(&mesh.shards.of(Holders::all), &mesh.shards.group);
        EXPECT_EQ(&one.shards.group, &world);
        EXPECT_TRUE(one.shards.replicas == nullptr && one.shards.experts == nullptr);
        return 0;
    });
}

// The ranks of a tensor group are neighbours, and those of a ring are that far apart: 0 2 | 1 3 || 4 6 | 5 7.
TEST(Mesh, TensorGroupsAreInnermost) {
    run_threads(8, {}, [](Comm &world) {
        const Mesh mesh(world, 2, 4, 1, 2);
        using Members = std::vector<int>;
        const int r = world.rank, pair = r / 2 * 2, ring = r / 4 * 4 + r % 2;
        EXPECT_EQ(mesh.shards.tensor->gather(r), (Members{pair, pair + 1}));
        EXPECT_EQ(mesh.ring->gather(r), (Members{ring, ring + 2}));
        EXPECT_EQ(mesh.shards.same_cut->gather(r), (Members{ring, ring + 2}));  // of the same group of four
        EXPECT_EQ((Members{mesh.dp, mesh.sp, mesh.tp, mesh.dp_rank, mesh.sp_rank, mesh.tp_rank}),
                  (Members{2, 2, 2, r / 4, r / 2 % 2, r % 2}));
        EXPECT_EQ(mesh.is_first_of_row(), r % 4 == 0);
        EXPECT_EQ(mesh.max_of_row(r), r / 4 * 4 + 3);
        return 0;
    });
    expect_contains(error_of([&] { run_threads(12, {}, [&](Comm &comm) { return Mesh(comm, 1, 0, 1, 5).dp; }); }),
                    {"--tensor_parallel 5 does not divide 12 ranks", "fix: use one of 1, 2, 3, 4, 6, 12"});
    expect_contains(error_of([&] { run_threads(12, {}, [&](Comm &comm) { return Mesh(comm, 4, 0, 1, 4).dp; }); }),
                    {"--ring_attn_size 4 does not divide 3 ranks", "fix: use one of 1, 3"});
}

TEST(Mesh, NoteOnARingAcrossHosts) {
    EXPECT_EQ(ring_across_hosts({"a", "a", "b", "b"}, 2), "");
    EXPECT_EQ(ring_across_hosts({"a", "a", "b", "b"}, 1), "");
    EXPECT_EQ(ring_across_hosts({"a", "a", "a", "b"}, 2),
              "ranks 2 to 3 share their sequences between the hosts a and b: keys and values cross the network");
}

// ---- the split

struct Documents {
    std::vector<size_t> offsets;
    size_t T;

    // Documents of these lengths, padded to a multiple of `unit`.
    Documents(const std::vector<size_t> &lengths, size_t unit) : offsets{0} {
        for (size_t length : lengths) offsets.push_back(offsets.back() + length);
        T = round_up(offsets.back(), unit);
    }
    Row row() const {
        Row row{};
        row.T = T, row.doc_offsets = offsets;
        return row;
    }
    size_t first_key(size_t p, size_t window) const {
        const size_t begin = *(std::upper_bound(offsets.begin(), offsets.end(), p) - 1);
        return window && p + 1 > begin + window ? p + 1 - window : begin;
    }
};

TEST(Split, ScoresEqualACountOfPairs) {
    const Documents docs({5, 1, 13, 40, 1, 1, 60, 3}, 64);
    for (size_t window : {0, 1, 7, 50})
        for (size_t size : {4, 16, 128}) {
            const size_t n = docs.T / size;
            std::vector<uint64_t> want(n * n);
            for (size_t q = 0; q < docs.T; q++)
                for (size_t k = docs.first_key(q, window); k <= q; k++) want[q / size * n + k / size]++;
            EXPECT_EQ(scores_of_pieces(docs.row(), size, window), want) << window << " " << size;
        }
    const AttentionCase shared{{9, 5, 1, 20, 3, 40, 2, 30, 18}, 0, 1, 1, 8, 0, 0, {0, 7, 7, 7, 0, 0, 33, 33, 0}};
    for (size_t window : {0, 1, 6, 30}) {
        AttentionCase a = shared;
        a.window = window;
        const size_t n = a.T() / 16;
        std::vector<uint64_t> want(n * n);
        for (size_t q = 0; q < a.T(); q++)
            for (size_t k : a.keys(q)) want[q / 16 * n + k / 16]++;
        EXPECT_EQ(scores_of_pieces(a.outline(), 16, window), want) << window;
        EXPECT_EQ(scores_of_row(a.outline(), window, true), double(std::accumulate(want.begin(), want.end(), uint64_t(0))));
    }
}

TEST(Split, LayoutsOfOneDocument) {
    const auto owners = [](Layout layout) {
        const SequenceSplit split = split_sequence(layout, Documents({32}, 32).row(), 2, full_layers, cost_of_8b(infinity));
        std::vector<std::vector<size_t>> out;
        for (const Pieces &pieces : split.pieces) {
            out.emplace_back();
            for (size_t i = 0; i < pieces.count; i++)
                out.back().insert(out.back().end(), {pieces.piece[i].begin, pieces.piece[i].end, pieces.piece[i].offset});
        }
        return out;
    };
    using Lists = std::vector<std::vector<size_t>>;
    EXPECT_EQ(owners(Layout::contiguous), (Lists{{0, 16, 0}, {16, 32, 0}}));
    EXPECT_EQ(owners(Layout::zigzag), (Lists{{0, 8, 0, 24, 32, 8}, {8, 24, 0}}));
    // pieces in pairs from the longest on; the first piece of a pair is for the rank with less work
    EXPECT_EQ(owners(Layout::longest_first),
              (Lists{{0, 2, 0, 6, 10, 2, 14, 18, 6, 22, 26, 10, 30, 32, 14}, {2, 6, 0, 10, 14, 4, 18, 22, 8, 26, 30, 12}}));
}

// A cut is the beginning of a document of 256 positions or more, except the first document.
TEST(Split, CutsAreTheBeginningsOfLongDocuments) {
    using Cuts = std::vector<int32_t>;
    EXPECT_EQ(tile_cuts(std::vector<size_t>{0}, 4096), Cuts());
    EXPECT_EQ(tile_cuts(std::vector<size_t>{0, 10, 1000, 1255, 1511, 1600}, 2000), (Cuts{10, 1255, 1600}));  // with padding
    EXPECT_EQ(tile_cuts(std::vector<size_t>{0, 300, 600}, 600), Cuts{300});                                  // without
    for (const size_t T : {1, 256, 257, 512, 513, 5000}) {
        std::vector<size_t> offsets{0};
        for (size_t begin = 1; begin < T; begin += TileCuts::shortest) offsets.push_back(begin);
        EXPECT_EQ(tile_cuts(offsets, T).size(), TileCuts::most(T)) << T;
    }
}

// ---- the choice

static std::vector<Documents> log_normal_rows(size_t count, size_t T, uint32_t stream) {
    const Random random{1, Purpose::test, stream};
    std::vector<Documents> rows;
    for (uint64_t drawn = 0; rows.size() < count;) {
        std::vector<size_t> lengths;
        for (size_t left = T; left;) {
            const double length = std::exp(7.5 + 1.2 * random.normal(drawn++));
            lengths.push_back(std::min(left, size_t(std::max(1.0, std::round(length)))));
            left -= lengths.back();
        }
        rows.emplace_back(lengths, T);
    }
    return rows;
}

TEST(Split, ChosenLayoutIsBalancedAndTheFastest) {
    for (const double bandwidth : {infinity, 50e9}) {
        double chosen = 0, balance = 0, each[3] = {};
        for (const Documents &docs : log_normal_rows(300, 32768, 1)) {
            double best = infinity;
            for (size_t i = 0; i < 3; i++) {
                const double seconds = split_sequence(layouts[i], docs.row(), 8, full_layers, cost_of_8b(bandwidth)).seconds;
                each[i] += seconds, best = std::min(best, seconds);
            }
            const SequenceSplit split = choose_split(docs.row(), 8, full_layers, cost_of_8b(bandwidth));
            EXPECT_LE(split.seconds, best);
            chosen += split.seconds, balance += split.balance() / 300;
        }
        for (double seconds : each) EXPECT_TRUE(chosen < seconds || bandwidth == infinity) << seconds;
        EXPECT_TRUE(bandwidth < infinity || balance >= 0.99) << balance;
    }
}

TEST(Split, ShortDocumentsAreNotSent) {
    for (size_t length : {512, 509, 500}) {
        const Documents docs(std::vector<size_t>(64, length), 8 * row_multiple);
        for (double bandwidth : {50e9, infinity}) {
            const SequenceSplit split = choose_split(docs.row(), 8, full_layers, cost_of_8b(bandwidth));
            const double share = double(split.travel[0].row_hops()) /
                                 double(docs.T * 7);  // of a single document, whose rows are sent to all other ranks
            EXPECT_GE(split.balance(), 0.98);
            EXPECT_LE(bandwidth < infinity ? share : 0, 0.05);
        }
    }
}

TEST(Split, BordersWithinDocuments) {
    const LayerKind whole[] = {{0, 1}};
    using Border = std::array<size_t, 6>;
    const auto borders = [&](Layout layout, size_t ranks, const std::vector<size_t> &offsets) {
        std::vector<Border> out;
        const AttentionCost cost{1, 1, 1, 2, 1e12, 1e10};
        Row row{};
        row.T = 256, row.doc_offsets = offsets;
        for (const PieceBorder &b : piece_borders(split_sequence(layout, row, ranks, whole, cost), offsets))
            out.push_back({b.from, b.from_piece, b.from_continues, b.to, b.to_piece, b.to_continues});
        return out;
    };
    EXPECT_EQ(borders(Layout::contiguous, 4, {0, 100, 128, 256}), (std::vector<Border>{{0, 0, 0, 1, 0, 0}, {2, 0, 0, 3, 0, 0}}));
    EXPECT_EQ(borders(Layout::contiguous, 4, {0, 193}),
              (std::vector<Border>{{0, 0, 0, 1, 0, 1}, {1, 0, 1, 2, 0, 1}, {2, 0, 1, 3, 0, 0}}));
    EXPECT_EQ(borders(Layout::contiguous, 4, {0, 64}), (std::vector<Border>{}));  // the rest is padding
    EXPECT_EQ(borders(Layout::zigzag, 2, {0, 256}), (std::vector<Border>{{0, 0, 0, 1, 0, 1}, {1, 0, 1, 0, 1, 0}}));
}

TEST(Split, RowsAreDealtLongestFirst) {
    using Dealt = std::vector<std::vector<size_t>>;
    EXPECT_EQ(deal_rows(std::vector<double>{3, 9, 1, 8, 5}, 2), (Dealt{{1, 0, 2}, {3, 4, no_row}}));
    EXPECT_EQ(deal_rows(std::vector<double>{4}, 3), (Dealt{{0}, {no_row}, {no_row}}));
    EXPECT_EQ(deal_rows({}, 2), (Dealt{{}, {}}));
    EXPECT_EQ(deal_rows(std::vector<double>{2, 2, 2, 2}, 1), (Dealt{{0, 1, 2, 3}}));
}
