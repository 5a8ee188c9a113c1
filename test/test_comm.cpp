// A world of one, and ranks that are threads.
#include <atomic>

#include "comm_checks.h"

using namespace comm_checks;

static double seconds_of(const std::function<void()> &f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

static std::string error_of_run(int ranks, const CommOptions &options, const std::function<void(Comm &)> &f) {
    return error_of([&] { run_threads(ranks, options, [&](Comm &c) { return f(c), 0; }); });
}

struct CommCalls : testing::TestWithParam<int> {};

TEST_P(CommCalls, EveryCallOfEveryType) {
    SelfComm self;
    if (GetParam() == 0) everything(self);
    else EXPECT_EQ(error_of_run(GetParam(), {.check = false, .timeout = 60}, everything), "no error");
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommCalls, testing::Values(0, 1, 2, 3, 8),
                         [](const auto &info) { return info.param ? format("threads%d", info.param) : std::string("self"); });

TEST(Comm, WaitingIsIdle) {
    EXPECT_EQ(error_of_run(4, {}, [](Comm &c) { waiting_is_idle(c, 0.2, RUSAGE_THREAD); }), "no error");
}

TEST(Comm, ReturnsTheResultOfRankZero) {
    EXPECT_EQ(run_threads(3, {}, [](Comm &c) { return c.rank == 0 ? 7 : 1; }), 7);
}

// As for a GPU, whose arrays the host must not touch: here what `copy` did not bring is not there.
TEST(Comm, SlicesOfADeviceAreOnlyCopied) {
    constexpr ptrdiff_t device = ptrdiff_t(1) << 46;  // device addresses are host addresses plus this
    constexpr size_t n = 1001;
    const auto real = [](const void *p) {
        const auto address = reinterpret_cast<ptrdiff_t>(p);
        return reinterpret_cast<void *>(address >= device * 3 ? address - device * 3 : address);
    };
    const auto on_device = [](float *p) { return reinterpret_cast<float *>(reinterpret_cast<ptrdiff_t>(p) + device * 3); };
    std::atomic<int> finished = 0;
    const auto use = [&](Comm &c) {
        c.memory.finish = [&] { finished++; };
        c.memory.copy = [&](void *to, const void *from, size_t bytes) { memcpy(real(to), real(from), bytes); };
        const size_t ranks = size_t(c.size), own = size_t(c.rank);
        auto data = values<float>(c.rank, n);
        std::vector<float> all(n * ranks), crossed(n * ranks), hop(n);
        float *const d = on_device(data.data()), *const a = on_device(all.data());
        const auto split = c.split(0, c.rank);
        split->all_gather({d, n}, {a, n * ranks});
        for (int r = 0; r < c.size; r++) expect_bits("all_gather", &all[size_t(r) * n], values<float>(r, n).data(), n);
        split->all_to_all({a, n * ranks}, {on_device(crossed.data()), n * ranks});
        expect_bits("all_to_all", &crossed[0], values<float>(c.rank, n).data(), n);
        c.wait(c.exchange({d, n}, (c.rank + 1) % c.size, {on_device(hop.data()), n}, (c.rank + c.size - 1) % c.size));
        expect_bits("exchange", hop.data(), values<float>((c.rank + c.size - 1) % c.size, n).data(), n);
        c.all_reduce_sum({d, n});
        const auto want = sum_of_all<float>(c.size, n);
        expect_bits("all_reduce_sum", data.data(), want.data(), n);
        c.broadcast({d, n}, c.size - 1);
        EXPECT_EQ(c.sum(1.0), c.size);
        c.reduce_scatter_sum({a, n * ranks}, {a + own * n, n});
    };
    EXPECT_EQ(error_of_run(3, {}, use), "no error");
    EXPECT_GE(finished, 3 * 6);
}

TEST(Comm, ARankThatThrowsEndsAll) {
    const double seconds = seconds_of([] {
        const std::string said = error_of_run(8, {}, [](Comm &c) {
            std::vector<float> data(100);
            const auto half = c.split(c.rank % 2, 0);
            if (c.rank == 5) die("rank 5 is out of luck");
            if (c.rank % 2) c.wait(c.exchange({}, -1, {data.data(), 100}, 5));
            for (;;) half->all_reduce_sum({data.data(), 100});
        });
        EXPECT_EQ(said, "rank 5: rank 5 is out of luck");
    });
    EXPECT_LT(seconds, 30);
}

// What rank 0 sends dies with it: nobody may read it afterwards (the sanitizer builds would see it).
TEST(Comm, WhatAFailedRankSentIsWithdrawn) {
    const std::string said = error_of_run(2, {}, [](Comm &c) {
        std::vector<float> data(1 << 20, 1.0f);
        if (c.rank == 0) {
            const Request request = c.exchange({data.data(), data.size()}, 1, {}, -1);
            die("gone");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        c.wait(c.exchange({}, -1, {data.data(), data.size()}, 0));
    });
    EXPECT_EQ(said, "rank 0: gone");
}

TEST(Comm, ARankThatHasEndedIsNotWaitedFor) {
    const std::string said = error_of_run(3, {}, [](Comm &c) {
        if (c.rank != 1) c.barrier();
    });
    expect_contains(said, {"waits for rank 1, which has ended"});
}

TEST(Comm, AHungRunEndsWithEveryRanksLastCall) {
    const std::string said = error_of_run(3, {.check = false, .timeout = 2}, [](Comm &c) {
        c.sum(1.0);
        if (c.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(4));
        if (c.rank == 2) c.wait(c.exchange({}, -1, {}, -1));
        c.max(1.0);
    });
    expect_contains(
        said, {"has waited longer than --comm_timeout 2", "rank 0: in max ", "rank 1: back from sum(double) ", "test_comm.cpp:"});
}

TEST(SlowComm, AThreadThatNeverComesBackIsNotWaitedFor) {
    const auto run = [](Comm &c) {
        if (c.rank == 1) std::this_thread::sleep_for(std::chrono::minutes(10));
        c.barrier();
        return 0;
    };
    EXPECT_EXIT(run_threads(2, {.check = false, .timeout = 1}, run), testing::ExitedWithCode(1), "rank 1: no call yet");
}

TEST(Comm, WrongArgumentsAreRefusedByTheCaller) {
    SelfComm c;
    std::vector<float> data(4);
    std::vector<double> other(4);
    expect_error([&] { c.all_gather({data.data(), 2}, {data.data(), 4}); }, {"all_gather(2 f32)"});
    expect_error([&] { c.reduce_scatter_sum({data.data(), 4}, {other.data(), 4}); }, {"one type"});
    expect_error([&] { c.broadcast({data.data(), 4}, 1); }, {"root"});
}
