// OpenMP's threads wait for each other at the end of each parallel region, thousands of times a second. On an idle machine they do so best by reading a
// word in a loop, for some milliseconds before they sleep. On a machine that other programs use too, such a loop uses up the thread's share of its core,
// so the kernel takes the core away when the thread has work again, and all other threads wait for it: one busy program beside a training run then
// slows it down to a third, or with `nice` to a twentieth.
//
// libgomp, the OpenMP of g++, shortens the loop to a hundred rounds while a process has more OpenMP threads than cores, but it does not know how busy the
// cores are. The kernel does: it counts the time for which a thread was ready to run without a core (proc_pid_schedstat(5)). While that is a tenth of
// the elapsed time or more, a ContentionWatch keeps a team of sleeping threads, one more than there are cores. dev/bench/contention.py measures the effect.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

// Returns the nanoseconds for which this process's present threads have been ready to run without a core; 0 where the kernel does not count them.
uint64_t time_without_core();

class ContentionWatch {
  public:
    ContentionWatch();
    ContentionWatch(const ContentionWatch &) = delete;
    ~ContentionWatch();
    bool contended();  // true while it keeps the team

  private:
    void watch();
    bool ends_within(double seconds);

    std::mutex mutex_;
    std::condition_variable changed_;
    bool ends_ = false, contended_ = false;
    std::thread watcher_;
};
