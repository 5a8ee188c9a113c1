// Arrays of a shard in pieces, which are stored in a file between uses.
#include "../llmc/parallel/pieces.h"

#include "check.h"

namespace {

// Units shorter than a piece, of exactly one, of several and of none.
const std::vector<Unit> units = {{0, 104}, {104, 4200}, {4200, 4200}, {4200, 20008}, {20008, 20016}};
constexpr size_t count = 20016;

struct OffloadedPieces {
    HostMemory memory;
    Sharding sharding{units, 0, 1, 0, 0};
    ShardPieces pieces{sharding, 1};
    Plan plan;
    float *floats = nullptr;
    uint8_t *bytes = nullptr;
    std::unique_ptr<Arena> arena;
    std::unique_ptr<Store> store;

    OffloadedPieces() {
        pieces.add(plan, &floats, "floats"), pieces.add(plan, &bytes, "bytes");
        pieces.plan_windows(plan, false);
        plan.place(true);
        arena = std::make_unique<Arena>(plan, memory);
        store = make_disk_store(testing::TempDir(), plan.store_bytes(), 60);
        pieces.use(*store, memory);
    }
    std::vector<float> loaded() {  // (count) the floats, as a model loads them
        std::vector<float> out;
        const size_t bytes = round_up(count * sizeof(float), store_alignment);
        auto *const to = reinterpret_cast<float *>(memory.allocate(bytes));
        for (size_t u = 0; u < units.size(); u++) {
            if (units[u].begin == units[u].end) continue;
            pieces.bring(u, to), pieces.wait(u);
            out.insert(out.end(), to, to + (units[u].end - units[u].begin));
        }
        memory.release(reinterpret_cast<std::byte *>(to), bytes);
        return out;
    }
};

}  // namespace

// Passes over the shard change all pieces or some of them. Between two passes one piece is changed by itself.
TEST(ShardPieces, KeepTheirValues) {
    OffloadedPieces p;
    std::vector<float> want(count);
    EXPECT_EQ(p.loaded(), want) << "pieces are initially 0";
    const auto pass = [&](size_t first, size_t step, float add) {
        p.pieces.in_pieces(0, count, [&](size_t number, size_t begin, size_t n) {
            if (number < first || (number - first) % step) return;
            p.pieces.reach(number);
            EXPECT_EQ(p.pieces.begin(), begin);
            for (size_t i = 0; i < n; i++) {
                EXPECT_EQ(p.floats[i], want[begin + i]) << begin + i;
                EXPECT_EQ(p.bytes[i], uint8_t(want[begin + i])) << begin + i;
                want[begin + i] = p.floats[i] += add + float(begin + i), p.bytes[i] = uint8_t(want[begin + i]);
            }
        });
        p.pieces.finish();
        EXPECT_EQ(p.loaded(), want);
    };
    pass(0, 1, 1);
    p.pieces.open(3), p.floats[7] = want[8296 + 7] = 5, p.bytes[7] = 5, p.pieces.keep();
    EXPECT_EQ(p.loaded(), want);
    pass(1, 2, 2);
    pass(2, 3, 3);
    p.pieces.open(3);
    EXPECT_TRUE(std::equal(p.floats, p.floats + 4096, &want[8296]));
    p.arena->check_guards();
}
