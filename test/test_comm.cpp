// A world of one rank, and ranks that are threads.
#include <atomic>

#include "comm_checks.h"

using namespace comm_checks;

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

// The host must not touch arrays of a GPU: here only `copy` knows how a device address becomes a host address.
TEST(Comm, SlicesOfADeviceAreOnlyCopied) {
    constexpr ptrdiff_t device = ptrdiff_t(3) << 46;  // a device address minus the host address
    constexpr size_t n = 1001;
    const auto real = [](const void *p) {
        const auto address = reinterpret_cast<ptrdiff_t>(p);
        return reinterpret_cast<void *>(address >= device ? address - device : address);
    };
    const auto on_device = [](float *p) { return reinterpret_cast<float *>(reinterpret_cast<ptrdiff_t>(p) + device); };
    std::atomic<int> finished = 0;
    const auto use = [&](Comm &c) {
        c.memory.finish = [&] { finished++; };
        c.memory.copy = [&](void *to, const void *from, size_t bytes) { memcpy(real(to), real(from), bytes); };
        const size_t ranks = size_t(c.size);
        const int next = (c.rank + 1) % c.size, before = (c.rank + c.size - 1) % c.size;
        auto data = values<float>(c.rank, n);
        std::vector<float> all(n * ranks), crossed(n * ranks), hop(n);
        float *const d = on_device(data.data()), *const a = on_device(all.data());
        const auto split = c.split(0, c.rank);
        split->all_gather({d, n}, {a, n * ranks});
        for (int r = 0; r < c.size; r++) expect_bits("all_gather", &all[size_t(r) * n], values<float>(r, n).data(), n);
        split->all_to_all({a, n * ranks}, {on_device(crossed.data()), n * ranks});
        expect_bits("all_to_all", &crossed[0], values<float>(c.rank, n).data(), n);
        c.wait(c.exchange({d, n}, next, {on_device(hop.data()), n}, before));
        expect_bits("exchange", hop.data(), values<float>(before, n).data(), n);
        c.all_reduce_sum({d, n});
        expect_bits("all_reduce_sum", data.data(), sum_of_all<float>(c.size, n).data(), n);
        c.broadcast({d, n}, c.size - 1);
        EXPECT_EQ(c.sum(1.0), c.size);
        c.reduce_scatter_sum({a, n * ranks}, {a + size_t(c.rank) * n, n});
    };
    EXPECT_EQ(error_of_run(3, {}, use), "no error");
    EXPECT_GE(finished, 3 * 6);
}

TEST(Comm, ErrorOfOneRankEndsAll) {
    const auto start = std::chrono::steady_clock::now();
    const std::string message = error_of_run(8, {}, [](Comm &c) {
        std::vector<float> data(100);
        const auto half = c.split(c.rank % 2, 0);
        if (c.rank == 5) die("rank 5 is out of luck");
        if (c.rank % 2) c.wait(c.exchange({}, -1, {data.data(), 100}, 5));
        for (;;) half->all_reduce_sum({data.data(), 100});
    });
    EXPECT_EQ(message, "rank 5: rank 5 is out of luck");
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

// The sent array is freed when rank 0 fails, and no rank may read it afterwards (a sanitizer build notices).
TEST(Comm, MessagesOfAFailedRankAreWithdrawn) {
    const std::string message = error_of_run(2, {}, [](Comm &c) {
        std::vector<float> data(1 << 20, 1.0f);
        if (c.rank == 0) {
            const Request request = c.exchange({data.data(), data.size()}, 1, {}, -1);
            die("gone");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        c.wait(c.exchange({}, -1, {data.data(), data.size()}, 0));
    });
    EXPECT_EQ(message, "rank 0: gone");
}

TEST(Comm, NoRankWaitsForOneThatHasEnded) {
    EXPECT_NE(error_of_run(3, {}, [](Comm &c) { c.rank != 1 ? c.barrier() : void(); }).find("waits for rank 1, which has ended"),
              std::string::npos);
}

TEST(Comm, TimeoutNamesTheLastCallOfEachRank) {
    const std::string message = error_of_run(3, {.check = false, .timeout = 2}, [](Comm &c) {
        c.sum(1.0);
        if (c.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(4));
        if (c.rank == 2) c.wait(c.exchange({}, -1, {}, -1));
        c.max(1.0);
    });
    expect_contains(message, {"has waited longer than --comm_timeout 2", "rank 0: in max ", "rank 1: back from sum(double) ",
                              "test_comm.cpp:"});
}

TEST(SlowComm, TimeoutEndsARunWithAHungThread) {
    const auto run = [](Comm &c) {
        if (c.rank == 1) std::this_thread::sleep_for(std::chrono::minutes(10));
        c.barrier();
        return 0;
    };
    EXPECT_EXIT(run_threads(2, {.check = false, .timeout = 1}, run), testing::ExitedWithCode(1), "rank 1: no call yet");
}
