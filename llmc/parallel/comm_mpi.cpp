#include "comm_mpi.h"

#include <cstdlib>

bool started_by_mpirun() {
    for (const char *name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"})  // Open MPI; MPICH; srun --mpi=pmix
        if (getenv(name)) return true;
    return false;
}

#ifndef LLMC_MPI
int run_mpi(const CommOptions &, const std::function<int(Comm &)> &) {
    die("started by mpirun, but built without MPI\n  fix: make deps && make, or start it alone");
}
#else
#define OMPI_SKIP_MPICXX 1  // the C interface alone
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "pairwise.h"

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
static constexpr size_t piece_bytes = size_t(1) << 28;  // of one MPI message, whose count is an int
static constexpr Seconds shortest_sleep(5e-6), longest_sleep(2e-3), watchdog_period(0.1), answers_within(5);

static void check_mpi(int code) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, text, &length);
    die("MPI: %s", text);
}

[[noreturn]] static void end_everywhere(const std::string &message) {
    fflush(stdout);
    fprintf(stderr, "%s\n", message.c_str());
    fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, 1);
    abort();
}

namespace {

// A thread that answers what this rank is doing when another asks, and asks all if this one has waited too long; then the run ends.
// So the ranks' last calls are known even if one of them never comes back from its own work.
class Watchdog {
  public:
    Watchdog(int rank, int ranks, double timeout) : rank_(rank), ranks_(ranks), timeout_(timeout) {
        check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm_));
        thread_ = std::thread([this] { watch(); });
    }
    ~Watchdog() {
        {
            std::lock_guard lock(mutex_);
            stop_ = true;
        }
        wake_.notify_one();
        thread_.join();
    }

    void enter(const Stamp &stamp) {
        std::lock_guard lock(mutex_);
        state_ = stamp;
    }
    void waits(bool waits) {
        std::lock_guard lock(mutex_);
        waits_ = waits, since_ = Clock::now();
    }

  private:
    enum Tag { ask, tell };

    std::string state() {
        std::lock_guard lock(mutex_);
        return describe_rank(state_, waits_);
    }

    void watch() {
        std::unique_lock lock(mutex_);
        while (!wake_.wait_for(lock, watchdog_period, [&] { return stop_; })) {
            const bool too_long = waits_ && Clock::now() - since_ > Seconds(timeout_);
            lock.unlock();
            if (answer() < rank_) another_reports_ = true;
            if (too_long && !another_reports_) report();
            lock.lock();
        }
    }

    // Returns the lowest rank that asked since last time.
    int answer() {
        int lowest = ranks_, there = 0;
        MPI_Status status;
        while (MPI_Iprobe(MPI_ANY_SOURCE, ask, comm_, &there, &status), there) {
            MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, ask, comm_, MPI_STATUS_IGNORE);
            const std::string text = state();
            MPI_Send(text.data(), int(text.size()), MPI_BYTE, status.MPI_SOURCE, tell, comm_);
            lowest = std::min(lowest, status.MPI_SOURCE);
        }
        return lowest;
    }

    // Of several ranks that have waited too long, the lowest reports.
    void report() {
        std::vector<std::string> states(static_cast<size_t>(ranks_));
        for (int r = 0; r < ranks_; r++)
            if (r == rank_) states[size_t(r)] = state();
            else MPI_Send(nullptr, 0, MPI_BYTE, r, ask, comm_);
        int missing = ranks_ - 1;
        for (const auto start = Clock::now(); missing && Clock::now() - start < answers_within;) {
            if (answer() < rank_) {
                another_reports_ = true;
                return;
            }
            MPI_Status status;
            int there = 0, length = 0;
            MPI_Iprobe(MPI_ANY_SOURCE, tell, comm_, &there, &status);
            if (!there) {
                std::this_thread::sleep_for(longest_sleep);
                continue;
            }
            MPI_Get_count(&status, MPI_BYTE, &length);
            std::string &text = states[size_t(status.MPI_SOURCE)];
            text.resize(size_t(length));
            MPI_Recv(text.data(), length, MPI_BYTE, status.MPI_SOURCE, tell, comm_, MPI_STATUS_IGNORE);
            missing--;
        }
        end_everywhere(hung_message(rank_, timeout_, states));
    }

    const int rank_, ranks_;
    const double timeout_;
    MPI_Comm comm_;
    std::mutex mutex_;
    std::condition_variable wake_;
    Stamp state_;
    bool waits_ = false, stop_ = false;
    Clock::time_point since_;
    bool another_reports_ = false;  // the thread's own
    std::thread thread_;
};

class MpiTransport final : public Transport {
  public:
    MpiTransport(int rank, int ranks, double timeout) : watchdog_(rank, ranks, timeout) {}

    uint64_t post(int tag, const void *send, size_t send_bytes, int to, void *recv, size_t recv_bytes, int from,
                  const SliceMemory &) override {
        Pending &p = pending_[++last_id_];
        for (size_t first = 0; first < recv_bytes; first += piece_bytes) {
            p.expected.push_back(int(std::min(piece_bytes, recv_bytes - first)));
            check_mpi(MPI_Irecv(static_cast<std::byte *>(recv) + first, p.expected.back(), MPI_BYTE, from, tag, MPI_COMM_WORLD,
                                &p.requests.emplace_back()));
        }
        for (size_t first = 0; first < send_bytes; first += piece_bytes)
            check_mpi(MPI_Isend(static_cast<const std::byte *>(send) + first, int(std::min(piece_bytes, send_bytes - first)),
                                MPI_BYTE, to, tag, MPI_COMM_WORLD, &p.requests.emplace_back()));
        return last_id_;
    }

    void wait(uint64_t id) override {
        Pending &p = pending_.at(id);
        std::vector<MPI_Status> statuses(p.requests.size());
        wait_until([&] {
            int done = 0;
            const int code = MPI_Testall(int(p.requests.size()), p.requests.data(), &done, statuses.data());
            if (code == MPI_ERR_IN_STATUS)
                for (const MPI_Status &status : statuses) check_mpi(status.MPI_ERROR);
            check_mpi(code);
            return done != 0;
        });
        for (size_t i = 0; i < p.expected.size(); i++) {
            int length = 0;
            MPI_Get_count(&statuses[i], MPI_BYTE, &length);
            if (length != p.expected[i])
                die("rank %d sent %d bytes where %d were expected", statuses[i].MPI_SOURCE, length, p.expected[i]);
        }
        pending_.erase(id);
    }

    void withdraw(uint64_t id) noexcept override {
        for (MPI_Request &request : pending_.at(id).requests)
            if (request != MPI_REQUEST_NULL) MPI_Cancel(&request), MPI_Request_free(&request);
        pending_.erase(id);
    }

    void enter(const Stamp &stamp) override { watchdog_.enter(stamp); }

  private:
    struct Pending {
        std::vector<MPI_Request> requests;  // receives, then sends
        std::vector<int> expected;          // bytes of each receive
    };

    // Asks again after sleeps that grow with the time waited so far: at most an eighth is added to it, and a waiting rank leaves its core to others.
    template <class F> void wait_until(F test) {
        if (test()) return;
        watchdog_.waits(true);
        const auto start = Clock::now();
        do std::this_thread::sleep_for(std::clamp<Seconds>((Clock::now() - start) / 8, shortest_sleep, longest_sleep));
        while (!test());
        watchdog_.waits(false);
    }

    Watchdog watchdog_;
    uint64_t last_id_ = 0;
    std::map<uint64_t, Pending> pending_;
};

}  // namespace

int run_mpi(const CommOptions &options, const std::function<int(Comm &)> &f) {
    int provided = 0, rank = 0, ranks = 0, result = 1;
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS)
        die("MPI does not start\n  fix: start it by mpirun of the MPI it was built with");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    std::string agreed;
    try {
        if (provided < MPI_THREAD_MULTIPLE)
            die("this MPI allows calls from one thread only\n  fix: one with MPI_THREAD_MULTIPLE");
        MpiTransport transport(rank, ranks, options.timeout);
        std::vector<int> members(static_cast<size_t>(ranks));
        std::iota(members.begin(), members.end(), 0);
        PairwiseComm comm(transport, members, rank, 0);
        comm.check = options.check;
        try {
            result = f(comm);
        } catch (const AgreedError &error) {
            if (error.ranks < ranks) throw;
            agreed = error.what();
        }
        comm.barrier();  // MPI_Finalize waits, too, but awake
    } catch (const std::exception &error) {
        end_everywhere(format("rank %d: %s", rank, error.what()));
    }
    MPI_Finalize();
    if (rank == 0 && !agreed.empty()) throw AgreedError(agreed, ranks);
    return result;
}
#endif
