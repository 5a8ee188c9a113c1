// When the watchdog of NCCL's calls ends a run. Events are numbers, and the device has come to those up to `come`.
#include "../llmc/parallel/watched_calls.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace {

using Calls = WatchedCalls<int>;
using std::chrono::seconds;
constexpr double timeout = 600;

struct Watched {
    Calls watched;
    int come = -1;
    bool broken = false;
    std::vector<uint64_t> released;

    // Call n is between events 2n and 2n + 1.
    void queue(uint64_t id, bool returned = true) {
        watched.calls.push_back({id, "call", int(2 * id), int(2 * id + 1), returned, {}});
    }
    uint64_t late(int second) {  // the id of the call that is late then; 0: none
        const auto reached = [&](int event) {
            if (broken) throw std::runtime_error("an illegal address");
            return event <= come;
        };
        const auto *call = watched.late(Calls::Clock::time_point(seconds(second)), std::chrono::duration<double>(timeout),
                                        reached, [&](const Calls::Call &c) { released.push_back(c.id); });
        return call ? call->id : 0;
    }
};

}  // namespace

TEST(WatchedCalls, TheClockStartsWhenTheCallCouldStart) {
    Watched w;
    w.queue(1), w.queue(2);
    EXPECT_EQ(w.late(0), 0u);
    EXPECT_EQ(w.late(5000), 0u);  // kernels in front of it take longer than the limit
    w.come = 2;
    EXPECT_EQ(w.late(5001), 0u);
    EXPECT_EQ(w.late(5601), 0u);
    EXPECT_EQ(w.late(5602), 1u);  // the other rank has not come
}

TEST(WatchedCalls, EveryCallHasItsOwnClock) {
    Watched w;
    w.queue(1), w.queue(2);
    w.come = 2;
    EXPECT_EQ(w.late(0), 0u);
    w.come = 4;  // the first is done, the second could start
    EXPECT_EQ(w.late(599), 0u);
    EXPECT_EQ(w.released, std::vector<uint64_t>{1});
    EXPECT_EQ(w.late(601), 0u);
    EXPECT_EQ(w.late(1200), 2u);
    w.come = 5;
    EXPECT_EQ(w.late(1201), 0u);
    EXPECT_TRUE(w.watched.calls.empty());
    EXPECT_EQ(w.released, (std::vector<uint64_t>{1, 2}));
}

// As ncclCommInitRank, which waits on the host for the other ranks.
TEST(WatchedCalls, ACallThatHasNotReturnedIsWatched) {
    Watched w;
    w.queue(1, false);
    w.come = 3;  // later events on the stream mean nothing while `done` is missing
    EXPECT_EQ(w.late(0), 0u);
    EXPECT_EQ(w.late(601), 1u);
    w.watched.calls.front().queued = true;
    EXPECT_EQ(w.late(602), 0u);
}

TEST(WatchedCalls, AnErrorOfTheDeviceIsToldAtOnce) {
    Watched w;
    w.queue(1);
    EXPECT_EQ(w.late(0), 0u);
    w.broken = true;
    EXPECT_THROW(w.late(1), std::runtime_error);
}
