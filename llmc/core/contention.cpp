#include "contention.h"

#include <omp.h>

#include <chrono>
#include <filesystem>
#include <fstream>

uint64_t time_without_core() {
    uint64_t sum = 0;
    std::error_code none;
    for (const auto &thread : std::filesystem::directory_iterator("/proc/self/task", none)) {
        uint64_t running = 0, waiting = 0;
        if (std::ifstream(thread.path() / "schedstat") >> running >> waiting) sum += waiting;
    }
    return sum;
}

ContentionWatch::ContentionWatch() : watcher_([this] { watch(); }) {}

ContentionWatch::~ContentionWatch() {
    {
        std::lock_guard lock(mutex_);
        ends_ = true;
    }
    changed_.notify_all();
    watcher_.join();
}

bool ContentionWatch::contended() {
    std::lock_guard lock(mutex_);
    return contended_;
}

bool ContentionWatch::ends_within(double seconds) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return ends_; });
}

void ContentionWatch::watch() {
    constexpr double period = 0.2, bound = 0.1;
    std::thread team;
    for (uint64_t before = time_without_core(); !ends_within(period);) {
        const uint64_t now = time_without_core();  // less than before if a thread has ended
        const bool contended = now > before && double(now - before) * 1e-9 >= bound * period;
        before = now;
        if (contended == contended_) continue;
        {
            std::lock_guard lock(mutex_);
            contended_ = contended;
        }
        changed_.notify_all();
        if (team.joinable()) team.join();
        if (contended)
            team = std::thread([&] {
#pragma omp parallel num_threads(omp_get_num_procs() + 1)
#pragma omp master
                {
                    std::unique_lock lock(mutex_);
                    changed_.wait(lock, [&] { return !contended_ || ends_; });
                }
            });
    }
    if (team.joinable()) team.join();
}
