// The watchdog of NCCL's calls: the times at which it ends a run. Events are numbers, and the device has reached those up to `reached`.
#include "../llmc/parallel/watched_calls.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace {

using Calls = WatchedCalls<int>;
using std::chrono::seconds;

struct Watched {
    Calls watched;
    int reached = -1;
    bool broken = false;
    std::vector<uint64_t> released;

    // Call n is between events 2n and 2n + 1.
    void queue(uint64_t id, bool returned = true) {
        watched.calls.push_back({id, "call", int(2 * id), int(2 * id + 1), returned, {}});
    }
    uint64_t late(int second) {  // id of the call that exceeds 600 s at this time; 0: none
        const auto is_reached = [&](int event) {
            if (broken) throw std::runtime_error("an illegal address");
            return event <= reached;
        };
        const auto *call = watched.late(Calls::Clock::time_point(seconds(second)), std::chrono::duration<double>(600), is_reached,
                                        [&](const Calls::Call &c) { released.push_back(c.id); });
        return call ? call->id : 0;
    }
};

}  // namespace

TEST(WatchedCalls, ClockOfACallStartsWhenTheCallCanStart) {
    Watched w;
    w.queue(1), w.queue(2);
    for (const int second : {0, 5000}) EXPECT_EQ(w.late(second), 0u);  // earlier kernels may take longer than the limit
    w.reached = 2;
    for (const int second : {5001, 5601}) EXPECT_EQ(w.late(second), 0u);
    EXPECT_EQ(w.late(5602), 1u);  // another rank does not join the call
    w.reached = 4;                // the first call is done, the second can start
    EXPECT_EQ(w.late(5700), 0u);
    EXPECT_EQ(w.released, std::vector<uint64_t>{1});
    EXPECT_EQ(w.late(6300), 0u);
    EXPECT_EQ(w.late(6301), 2u);
    w.reached = 5;
    EXPECT_EQ(w.late(6302), 0u);
    EXPECT_TRUE(w.watched.calls.empty());
    EXPECT_EQ(w.released, (std::vector<uint64_t>{1, 2}));
}

// ncclCommInitRank waits on the host for the other ranks.
TEST(WatchedCalls, CallThatHasNotReturnedIsWatched) {
    Watched w;
    w.queue(1, false);
    w.reached = 3;  // later events of the stream say nothing about this call
    EXPECT_EQ(w.late(0), 0u);
    EXPECT_EQ(w.late(601), 1u);
    w.watched.calls.front().queued = true;
    EXPECT_EQ(w.late(602), 0u);
}

TEST(WatchedCalls, DeviceErrorIsReportedAtOnce) {
    Watched w;
    w.queue(1);
    w.broken = true;
    EXPECT_THROW(w.late(1), std::runtime_error);
}
