// The memory plan: arrays with overlapping lifetimes share no bytes. The debugging aids: guards, poison and the search for NaN.
#include "../llmc/core/arena.h"

#include <cmath>
#include <cstring>
#include <list>

#include "../llmc/core/rng.h"
#include "errors.h"

namespace {

struct Planned {  // a plan of byte arrays and the pointers that an arena sets
    Plan plan;
    std::list<uint8_t *> pointers;

    uint8_t *&add(const char *name, size_t bytes, size_t first, size_t last) {
        pointers.push_back(nullptr);
        plan.add(&pointers.back(), name, {bytes}, first, last);
        return pointers.back();
    }
};

constexpr size_t ops = 80;  // all lifetimes of random_plan end before

// Up to 60 arrays of random sizes and lifetimes. Every ninth lives always.
Planned random_plan(uint32_t number) {
    const Random random{number, Purpose::test, 0};
    Planned p;
    for (size_t i = 0, n = 1 + random.below(0, 60); i < n; i++) {
        const size_t first = random.below(4 * i + 1, ops / 2),
                     length = random.below(4 * i + 2, 1 + random.below(4 * i + 3, ops / 2));
        p.add("a", 1 + random.below(4 * i + 4, 3000), first, i % 9 ? first + length : Plan::always);
    }
    return p;
}

bool alive(const Segment &s, size_t op) { return s.first <= op && op <= s.last; }

// Bytes alive at the worst moment: no placement needs fewer.
size_t lower_bound(const Plan &plan) {
    size_t most = 0;
    for (size_t op = 0; op < ops; op++) {
        size_t bytes = 0;
        for (const Segment &s : plan.segments()) bytes += alive(s, op) ? round_up(s.bytes, Plan::alignment) : 0;
        most = std::max(most, bytes);
    }
    return most;
}

}  // namespace

TEST(Arena, ArraysAliveTogetherShareNoBytes) {
    double worst = 0;
    for (uint32_t number = 0; number < 300 && !HasFailure(); number++) {
        Planned p = random_plan(number);
        for (const size_t guard : {0, 256}) {
            p.plan.place(guard > 0);
            const auto &segments = p.plan.segments();
            for (const Segment &a : segments) {
                EXPECT_EQ(a.offset % Plan::alignment, 0u);
                EXPECT_LE(a.offset + a.bytes + guard, p.plan.bytes());
                for (const Segment *b = segments.data(); b != &a; b++) {
                    const bool in_time = a.first <= b->last && b->first <= a.last,
                               in_space = a.offset < b->offset + b->bytes + guard && b->offset < a.offset + a.bytes + guard;
                    EXPECT_FALSE(in_time && in_space) << "plan " << number;
                }
            }
            if (guard) EXPECT_GE(p.plan.bytes(), p.plan.sum() + guard * segments.size());
            else worst = std::max(worst, double(p.plan.bytes()) / double(lower_bound(p.plan)));
        }
    }
    printf("  %-40s %.2f times the lower bound at worst\n", "300 random plans", worst);
    EXPECT_LT(worst, 2);
}

TEST(Arena, PlacesInTheStoreFollowEachOtherAndAreInItsTable) {
    Plan plan;
    EXPECT_EQ(plan.store_table("on disk"), "");
    EXPECT_EQ(plan.add_place("act.0.x", 1), 0);
    EXPECT_EQ(plan.add_place("act.1.x", store_alignment + 1), store_alignment);
    EXPECT_EQ(plan.store_bytes(), 3 * store_alignment);
    expect_contains(plan.store_table("on disk"), {"act.*.x", "12.0 KiB"});
}

TEST(Arena, OverflowOfASizeIsRefused) {
    Plan plan;
    float *a;
    EXPECT_THROW(plan.add(&a, "a", {size_t(1) << 40, size_t(1) << 30}), Error);
}

TEST(Arena, GuardsNameTheOverrunArray) {
    for (const size_t bytes : {64, 65, 127}) {
        Planned p;
        p.add("act.0.other", 300, 0, 1);
        uint8_t *&a = p.add("act.3.qkv", bytes, 0, 1);
        p.plan.place(true);
        HostMemory memory;
        const Arena arena(p.plan, memory);
        memset(a, 7, bytes);
        for (const size_t behind : {0, 255}) {
            arena.check_guards();
            const uint8_t before = std::exchange(a[bytes + behind], 1);
            expect_error([&] { arena.check_guards(); }, {"act.3.qkv", std::to_string(bytes + behind)});
            a[bytes + behind] = before;
        }
    }
}

TEST(Arena, PoisonFillsOnlyDeadArrays) {
    for (uint32_t number = 0; number < 20; number++) {
        Planned p = random_plan(number);
        p.plan.place();
        HostMemory memory;
        Arena arena(p.plan, memory);
        const auto alive_at = [&](size_t op) {
            std::vector<bool> out(p.plan.bytes());
            for (const Segment &s : p.plan.segments())
                if (alive(s, op)) std::fill_n(out.begin() + ptrdiff_t(s.offset), s.bytes, true);
            return out;
        };
        const Segment &some = p.plan.segments().front();
        uint8_t *const base = static_cast<uint8_t *>(*some.pointer) - some.offset;
        for (size_t before = 0, now = 1; now < ops; before = now, now += 3)
            for (const bool only_newly_dead : {false, true}) {
                const auto spared = alive_at(now), were_alive = alive_at(before);
                memset(base, 1, p.plan.bytes());
                arena.poison_dead(now, only_newly_dead ? std::optional(before) : std::nullopt);
                for (size_t i = 0; i < spared.size(); i++)
                    ASSERT_EQ(base[i], spared[i] || (only_newly_dead && !were_alive[i]) ? 1 : 0xFF)
                        << "byte " << i << ", op " << before << " to " << now;
            }
    }
}

TEST(Arena, NonfiniteSearchesArraysThatTheOpMayHaveWritten) {
    Plan plan;
    float *weight, *x, *next, *far, *free, *later;
    bf16 *half;
    int32_t *index;
    plan.add(&weight, "weight", {4});
    plan.end_state();
    plan.add(&x, "act.0.x", {4}, 0, 9), plan.add(&next, "act.1.x", {4}, 0, 9), plan.add(&far, "act.12.x", {4}, 0, 9);
    plan.add(&half, "act.0.half", {3}, 0, 9), plan.add(&free, "dx", {(size_t(1) << 20) + 2}, 0, 9);
    plan.add(&later, "act.0.later", {4}, 5, 9), plan.add(&index, "rows", {4}, 0, 9);
    plan.place(true);  // no array shares bytes
    HostMemory memory;
    Arena arena(plan, memory);
    weight[0] = x[2] = next[1] = far[3] = later[0] = NAN, half[1] = bf16(INFINITY), index[0] = -1;
    free[size_t(1) << 20] = -INFINITY;  // beyond the first block of the search
    EXPECT_EQ(arena.nonfinite(4, 0), "element 2 of act.0.x");
    x[2] = 1;
    EXPECT_EQ(arena.nonfinite(4, 0), "element 1 of act.1.x");
    for (const size_t layer : {11, 12}) EXPECT_EQ(arena.nonfinite(4, layer), "element 3 of act.12.x");
    EXPECT_EQ(arena.nonfinite(4, 5), "element 1048576 of dx");
    next[1] = 0;
    EXPECT_EQ(arena.nonfinite(4, 0), "element 1 of act.0.half");
    half[1] = bf16(0.0f), free[size_t(1) << 20] = 0;
    EXPECT_EQ(arena.nonfinite(4, 0), "");
    arena.clear_new(3, 4);
    EXPECT_EQ(arena.nonfinite(5, 0), "element 0 of act.0.later");
    arena.clear_new(4, 5);
    EXPECT_EQ(later[0], 0);
    EXPECT_EQ(x[2], 1);
    EXPECT_EQ(arena.nonfinite(5, 0), "");
}
