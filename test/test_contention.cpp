// The watch for other programs on the machine (core/contention.h).
#include <gtest/gtest.h>
#include <omp.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "../llmc/core/contention.h"

// Two threads a core want to run, so each is without one for half of the time.
TEST(Contention, IsSeenWhileMoreThreadsThanCoresAreAtWork) {
    if (time_without_core() == 0) GTEST_SKIP() << "the kernel does not count the time that threads wait for a core";
    ContentionWatch watch;
    std::atomic<bool> ends = false;
    std::vector<std::thread> others;
    for (int i = 0; i < 2 * omp_get_num_procs(); i++)
        others.emplace_back([&] {
            while (!ends) continue;
        });
    for (int i = 0; i < 300 && !watch.contended(); i++) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_TRUE(watch.contended());
    ends = true;
    for (std::thread &thread : others) thread.join();
    EXPECT_GT(time_without_core(), 0u);
}  // the watch ends, with its team of sleeping threads
