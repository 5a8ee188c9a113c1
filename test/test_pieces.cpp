// Arrays of a shard that are stored in a file, in pieces.
#include "../llmc/parallel/pieces.h"

#include "check.h"

namespace {

// Units of less than a piece, of just one, of several and of none.
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
    // Calls f(piece, begin, n) for the pieces, in their order.
    template <class F> void each(F f) {
        pieces.in_pieces(0, count, [&](size_t p, size_t begin, size_t n) { f(p, begin, n); });
    }
    // The floats as a model reads them.
    std::vector<float> brought() {
        std::vector<float> out;
        const size_t room = round_up(count * sizeof(float), store_alignment);
        auto *const to = reinterpret_cast<float *>(memory.allocate(room));
        for (size_t u = 0; u < units.size(); u++) {
            if (units[u].begin == units[u].end) continue;
            pieces.bring(u, to), pieces.wait(u);
            out.insert(out.end(), to, to + (units[u].end - units[u].begin));
        }
        memory.release(reinterpret_cast<std::byte *>(to), room);
        return out;
    }
};

}  // namespace

// A pass through the shard adds to all elements, and another one to the elements of some pieces; in between, one piece is changed alone.
TEST(ShardPieces, ComeBackAsTheyLeft) {
    OffloadedPieces p;
    std::vector<float> want(count);
    EXPECT_EQ(p.brought(), want) << "never stored pieces are 0";
    const auto pass = [&](size_t first, size_t step, float add) {
        p.each([&](size_t number, size_t begin, size_t n) {
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
        EXPECT_EQ(p.brought(), want);
    };
    pass(0, 1, 1);
    p.pieces.open(3), p.floats[7] = want[8296 + 7] = 5, p.bytes[7] = 5, p.pieces.keep();
    EXPECT_EQ(p.brought(), want);
    pass(1, 2, 2);
    pass(2, 3, 3);
    p.pieces.open(3);
    for (size_t i = 0; i < 4096; i++) ASSERT_EQ(p.floats[i], want[8296 + i]) << i;
    p.arena->check_guards();
}
