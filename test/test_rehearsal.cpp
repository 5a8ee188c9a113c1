// What a rehearsal notes: lifetimes from first and last touches, and the times of ops.
#include "../llmc/core/rehearsal.h"

#include <gtest/gtest.h>

#include "../llmc/parallel/rehearsal_comm.h"

namespace {

// Two arrays and their log. An op is a number; all are of one pass and layer.
struct Rehearsed {
    Plan plan;
    float *a, *b;
    Touches log;
    RehearsalMemory memory{log};
    std::unique_ptr<Arena> arena;

    Rehearsed() {
        plan.transient(&a, "a", {64}), plan.transient(&b, "b", {64});
        plan.place(true);
        arena = std::make_unique<Arena>(plan, memory);
        log.watch(plan);
        log.begin_row();
    }
    void op(size_t number) { log.begin({0, number, 0}, true); }
    Touches::Lifetime of(size_t i) const { return log.lifetimes()[i]; }
    size_t time(size_t number) const { return log.times().at({0, number, 0}); }
    bool may_share() const { return of(0).last < of(1).first || of(1).last < of(0).first; }
};

}  // namespace

TEST(Rehearsal, AnArrayLivesFromItsFirstTouchToItsLast) {
    Rehearsed r;
    r.op(5), r.log.touch(r.a + 63);
    r.op(2), r.log.touch(r.a);
    r.op(7), r.log.touch(r.b), r.log.touch(nullptr);
    r.log.finish();
    EXPECT_EQ(r.of(0).first, r.time(5));
    EXPECT_EQ(r.of(0).last, r.time(2));
    EXPECT_EQ(r.of(1).first, r.time(7));
    EXPECT_TRUE(r.may_share());
}

TEST(Rehearsal, PassesShareTheirTimes) {
    Rehearsed r;
    r.op(0), r.op(1), r.log.touch(r.a);
    r.log.begin_row();
    r.op(0), r.log.touch(r.b), r.op(1), r.op(2), r.log.touch(r.a);
    r.log.finish();
    EXPECT_EQ(r.of(1).last, r.time(0));
    EXPECT_EQ(r.of(0).first, r.time(1));
    EXPECT_EQ(r.of(0).last, r.time(2));
}

TEST(Rehearsal, WhatIsAliveInALoopIsAliveThroughout) {
    Rehearsed r;
    for (int tile = 0; tile < 2; tile++) r.op(0), r.log.touch(r.a), r.op(1), r.log.touch(r.b);
    r.log.finish();
    EXPECT_FALSE(r.may_share());
}

TEST(Rehearsal, CallsBetweenTwoOpsHaveTimesOfTheirOwn) {
    Rehearsed r;
    r.op(0), r.log.pause({}), r.log.touch(r.a), r.log.touch(r.b);
    r.op(1);
    r.log.finish();
    EXPECT_TRUE(r.may_share());
    EXPECT_TRUE(r.of(0).in_pause);
    EXPECT_LT(r.time(0), r.of(0).first);
    EXPECT_LT(r.of(1).last, r.time(1));
}

TEST(Rehearsal, AMessageTouchesItsArraysUntilItHasArrived) {
    Rehearsed r;
    RehearsalComm comm(r.log, 0, 2);
    r.op(0);
    Request request = comm.start([&] { comm.all_gather({r.a, 8}, {r.a, 16}); });
    r.op(1), r.log.touch(r.b);
    r.op(2), comm.wait(std::move(request));
    r.log.finish();
    EXPECT_EQ(r.of(0).last, r.time(2));
    EXPECT_FALSE(r.may_share());
}

TEST(Rehearsal, ACopyTouchesItsArrayUntilItHasEnded) {
    Rehearsed r;
    RehearsalStore store(r.log);
    r.op(0), store.offload(0, r.a, 256);
    r.op(1), r.log.touch(r.b);
    r.op(2), store.wait(0);
    r.log.finish();
    EXPECT_EQ(r.of(0).last, r.time(2));
}
