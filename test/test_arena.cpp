// The memory plan: arrays with overlapping lifetimes share no byte; and the debugging aids.
#include "../llmc/core/arena.h"

#include <cmath>
#include <cstring>
#include <list>

#include "../llmc/core/rng.h"
#include "errors.h"

namespace {

struct Planned {  // a plan of bytes, and the pointers it sets
    Plan plan;
    std::list<uint8_t *> pointers;

    uint8_t *&add(const char *name, size_t bytes, size_t first, size_t last) {
        pointers.push_back(nullptr);
        plan.add(&pointers.back(), name, {bytes}, first, last);
        return pointers.back();
    }
};

bool overlap(const Segment &a, const Segment &b, size_t behind) {
    const bool time = a.first <= b.last && b.first <= a.last,
               space = a.offset < b.offset + b.bytes + behind && b.offset < a.offset + a.bytes + behind;
    return time && space;
}

// Bytes alive at the worst moment: no placement needs less.
size_t lower_bound(const Plan &plan, size_t ops) {
    size_t most = 0;
    for (size_t t = 0; t < ops; t++) {
        size_t alive = 0;
        for (const Segment &s : plan.segments())
            if (s.first <= t && t <= s.last) alive += round_up(s.bytes, Plan::alignment);
        most = std::max(most, alive);
    }
    return most;
}

}  // namespace

TEST(Arena, PlacesFollowEachOther) {
    Plan plan;
    EXPECT_EQ(plan.store_table("on disk"), "");
    EXPECT_EQ(plan.add_place("act.0.x", 1), 0);
    EXPECT_EQ(plan.add_place("act.1.x", store_alignment + 1), store_alignment);
    EXPECT_EQ(plan.store_bytes(), 3 * store_alignment);
    const std::string table = plan.store_table("on disk");
    expect_contains(table, {"act.*.x", "12.0 KiB"});
}

TEST(Arena, NothingThatLivesTogetherShares) {
    const size_t ops = 40;
    double worst = 0;
    for (uint32_t run = 0; run < 300; run++) {
        const Random random{run, Purpose::test, 0};
        Planned p;
        const size_t n = 1 + random.below(0, 60);
        for (size_t i = 0; i < n; i++) {
            const size_t first = random.below(4 * i + 1, ops), length = random.below(4 * i + 2, 1 + random.below(4 * i + 3, ops));
            p.add("a", 1 + random.below(4 * i + 4, 3000), first, i % 9 ? first + length : Plan::always);
        }
        for (const bool guards : {false, true}) {
            p.plan.place(guards);
            const auto &segments = p.plan.segments();
            for (size_t i = 0; i < n; i++) {
                EXPECT_EQ(segments[i].offset % Plan::alignment, 0u);
                EXPECT_LE(segments[i].offset + segments[i].bytes + (guards ? 256 : 0), p.plan.bytes());
                for (size_t j = 0; j < i; j++)
                    EXPECT_FALSE(overlap(segments[i], segments[j], guards ? 256 : 0)) << run << " " << i << " " << j;
            }
            if (guards) EXPECT_GE(p.plan.bytes(), p.plan.sum() + 256 * n);
            else worst = std::max(worst, double(p.plan.bytes()) / double(lower_bound(p.plan, 2 * ops)));
        }
        if (HasFailure()) return;
    }
    printf("  %-40s %.2f times the lower bound at worst\n", "300 random plans", worst);
    EXPECT_LT(worst, 2);
}

TEST(Arena, LayersShareTheirTransients) {
    Planned p;  // a small kept array and a large transient one per layer, as in a forward and backward pass
    const size_t layers = 12;
    for (size_t l = 0; l < layers; l++) {
        p.add("kept", 512, l, 2 * layers - 1 - l);
        p.add("forward", 6400, l, l);
        p.add("backward", 12800, 2 * layers - 1 - l, 2 * layers - 1 - l);
    }
    p.add("gradients", 1280, 0, Plan::always);
    p.plan.place();
    EXPECT_EQ(p.plan.sum(), layers * (512 + 6400 + 12800) + 1280);
    EXPECT_EQ(p.plan.bytes(), lower_bound(p.plan, 2 * layers));
    EXPECT_EQ(p.plan.bytes(), layers * 512 + 12800 + 1280);
}

TEST(Arena, ASizeThatOverflowsIsRefused) {
    Plan plan;
    float *a;
    EXPECT_THROW(plan.add(&a, "a", {size_t(1) << 40, size_t(1) << 30}), Error);
}

TEST(Arena, GuardsNameTheArrayWrittenBeyond) {
    for (const size_t bytes : {64, 65, 127}) {
        Planned p;
        p.add("act.0.other", 300, 0, 1);
        uint8_t *&a = p.add("act.3.qkv", bytes, 0, 1);
        p.add("act.0.next", 64, 2, 3);
        p.plan.place(true);
        HostMemory memory;
        Arena arena(p.plan, memory);
        memset(a, 7, bytes);
        arena.check_guards();
        for (const size_t behind : {0, 255}) {
            const uint8_t before = a[bytes + behind];
            a[bytes + behind] = 1;
            expect_error([&] { arena.check_guards(); }, {"act.3.qkv", std::to_string(bytes + behind)});
            a[bytes + behind] = before;
        }
        arena.check_guards();
    }
}

TEST(Arena, PoisonFillsOnlyTheDead) {
    for (uint32_t run = 0; run < 20; run++) {
        const Random random{run, Purpose::test, 1};
        Planned p;
        for (size_t i = 0; i < 30; i++) {
            const size_t first = random.below(3 * i, 20);
            p.add("a", 1 + random.below(3 * i + 1, 700), first, i % 9 ? first + random.below(3 * i + 2, 9) : Plan::always);
        }
        p.plan.place();
        HostMemory memory;
        Arena arena(p.plan, memory);
        std::vector<bool> were_alive(p.plan.bytes());
        size_t before = 0;
        for (size_t now = 0; now < 30; now++) {
            std::vector<bool> alive(p.plan.bytes());
            uint8_t *base = nullptr;
            for (const Segment &s : p.plan.segments()) {
                base = static_cast<uint8_t *>(*s.pointer) - s.offset;
                if (s.first <= now && now <= s.last) std::fill_n(alive.begin() + ptrdiff_t(s.offset), s.bytes, true);
            }
            memset(base, 1, p.plan.bytes());
            arena.poison_dead(now);
            for (size_t i = 0; i < alive.size(); i++) ASSERT_EQ(base[i], alive[i] ? 1 : 0xFF) << "byte " << i << " at " << now;
            memset(base, 1, p.plan.bytes());
            arena.poison_dead(now, before);
            for (size_t i = 0; i < alive.size(); i++)
                ASSERT_EQ(base[i], alive[i] || !were_alive[i] ? 1 : 0xFF)
                    << "byte " << i << " between " << before << " and " << now;
            were_alive = alive, before = now;
        }
    }
}

TEST(Arena, ValuesThatAreNotFiniteAreFoundWhereAnOpMayHaveWrittenThem) {
    Plan plan;
    float *weight, *x, *next, *far, *free, *later;
    bf16 *half;
    int32_t *index;
    plan.add(&weight, "weight", {4});
    plan.end_state();
    plan.add(&x, "act.0.x", {4}, 0, 9), plan.add(&next, "act.1.x", {4}, 0, 9), plan.add(&far, "act.12.x", {4}, 0, 9);
    plan.add(&half, "act.0.half", {3}, 0, 9), plan.add(&free, "dx", {(size_t(1) << 20) + 2}, 0, 9);
    plan.add(&later, "act.0.later", {4}, 5, 9), plan.add(&index, "rows", {4}, 0, 9);
    plan.place(true);  // nothing shares
    HostMemory memory;
    Arena arena(plan, memory);
    weight[0] = x[2] = next[1] = far[3] = later[0] = NAN, half[1] = bf16(INFINITY), index[0] = -1;
    free[size_t(1) << 20] = -INFINITY;  // in the second part that is read
    EXPECT_EQ(arena.nonfinite(4, 0), "element 2 of act.0.x");
    x[2] = 1;
    EXPECT_EQ(arena.nonfinite(4, 0), "element 1 of act.1.x");
    EXPECT_EQ(arena.nonfinite(4, 12), "element 3 of act.12.x");
    EXPECT_EQ(arena.nonfinite(4, 11), "element 3 of act.12.x");
    EXPECT_EQ(arena.nonfinite(4, 5), "element 1048576 of dx");
    next[1] = 0;
    EXPECT_EQ(arena.nonfinite(4, 0), "element 1 of act.0.half");
    half[1] = bf16(0.0f), free[size_t(1) << 20] = 0;
    EXPECT_EQ(arena.nonfinite(4, 0), "");
    EXPECT_EQ(arena.nonfinite(5, 0), "element 0 of act.0.later");
    arena.clear_new(3, 4);
    EXPECT_TRUE(std::isnan(later[0]));
    arena.clear_new(4, 5);
    EXPECT_EQ(later[0], 0);
    EXPECT_EQ(x[2], 1);
    EXPECT_EQ(arena.nonfinite(5, 0), "");
}
