#include "processes.h"

#include <algorithm>
#include <numeric>
#include <optional>

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
static constexpr Seconds watchdog_period(0.1), answers_within(5);

void say_last(const std::string &message) {
    fflush(stdout);
    if (!message.empty()) fprintf(stderr, "%s\n", message.c_str());
    fflush(stderr);
}

// ---- watchdog -------------------------------------------------------------------------------------------------------------------------

Watchdog::Watchdog(Line &line, int rank, int ranks, double timeout) : line_(line), rank_(rank), ranks_(ranks), timeout_(timeout) {
    thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
}

void Watchdog::enter(const Stamp &stamp) {
    std::lock_guard lock(mutex_);
    state_ = stamp;
}

void Watchdog::waits(bool waits) {
    std::lock_guard lock(mutex_);
    waits_ = waits, since_ = Clock::now();
}

std::string Watchdog::state() {
    std::lock_guard lock(mutex_);
    return describe_rank(state_, waits_);
}

// Of several ranks that have waited too long, the lowest reports.
void Watchdog::watch() {
    std::vector<std::string> states(static_cast<size_t>(ranks_));  // empty if the rank has not answered
    bool asked = false, lower_asks = false;
    Clock::time_point asked_at;
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, watchdog_period, [&] { return stop_; })) {
        const bool too_long = waits_ && Clock::now() - since_ > Seconds(timeout_);
        lock.unlock();
        for (Line::Word word; line_.receive(word);) {
            if (word.kind == Line::tell) states[size_t(word.from)] = word.text;
            else line_.send(Line::tell, word.from, state()), lower_asks = lower_asks || word.from < rank_;
        }
        if (too_long && !asked && !lower_asks) {
            asked = true, asked_at = Clock::now();
            for (int r = 0; r < ranks_; r++)
                if (r == rank_) states[size_t(r)] = state();
                else line_.send(Line::ask, r, "");
        }
        const bool all_answered = std::count(states.begin(), states.end(), "") == 0;
        if (asked && !lower_asks && (all_answered || Clock::now() - asked_at > answers_within))
            line_.end_everywhere(hung_message(rank_, timeout_, states));
        lock.lock();
    }
}

// ---- the run --------------------------------------------------------------------------------------------------------------------------

int run_process(Transport &transport, Line &line, int rank, int ranks, const CommOptions &options,
                const std::function<int(Comm &)> &f) {
    int result = 1;
    std::optional<AgreedError> agreed;
    try {
        std::vector<int> members(static_cast<size_t>(ranks));
        std::iota(members.begin(), members.end(), 0);
        PointToPointComm comm(transport, members, rank, 0);
        comm.check = options.check;
        try {
            result = f(comm);
        } catch (const AgreedError &error) {
            if (error.ranks < ranks) throw;
            agreed = error;
        }
        comm.barrier();  // so that an early rank waits asleep, while its watchdog can answer
    } catch (const std::exception &error) {
        line.end_everywhere(format("rank %d: %s", rank, error.what()));
    }
    if (rank == 0 && agreed) throw *agreed;
    return result;
}
