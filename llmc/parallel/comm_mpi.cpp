#include "comm_mpi.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

bool started_by_mpirun() {
    for (const char *name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"})  // Open MPI; MPICH; srun --mpi=pmix
        if (getenv(name)) return true;
    return false;
}

#ifdef LLMC_MPI
static constexpr const char *other_mpi =
    "they do not find each other: this program uses another MPI\n  fix: start it with mpirun of that MPI, which ldd names, or build it with mpicxx of this one";
#else
static constexpr const char *other_mpi = "this program was built without MPI\n  fix: make deps && make, or start it alone";
#endif
static constexpr const char *not_mpi =
    "they do not find each other without MPI\n  fix: start them with scripts/launch.sh or srun --mpi=pmix, use --ranks for threads of one process, or --rendezvous and --rank (docs/ranks.md)";

// A launcher sets these variables in each process that it starts: the number of processes, and this one's. A scheduler's allocation alone, in which
// one process may be started by hand, has other ones, such as SLURM_NTASKS.
static constexpr struct {
    const char *name, *size, *rank, *step, *why_alone;
} launchers[] = {{"mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", other_mpi},
                 {"mpirun of MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK", "PMI_RANK", other_mpi},
                 {"mpirun of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", other_mpi},
                 {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_ID", not_mpi},
                 {"torchrun or a similar launcher", "WORLD_SIZE", "RANK", "LOCAL_RANK", not_mpi}};

void expect_to_be_alone() {
    for (const auto &by : launchers) {
        const char *const size = getenv(by.size), *const rank = getenv(by.rank);
        if (!size || !rank || !getenv(by.step) || atoi(size) < 2) continue;
        if (strcmp(rank, "0") == 0) die("%s has started %s processes, but %s", by.name, size, by.why_alone);
        std::this_thread::sleep_for(std::chrono::milliseconds(200));  // a launcher may end all processes after the first
        std::_Exit(1);
    }
}

#ifndef LLMC_MPI
std::string mpi_library() { return "no MPI"; }

int run_mpi(const CommOptions &, const std::function<int(Comm &)> &f) {
    expect_to_be_alone();
    SelfComm comm;
    return f(comm);
}
#else
#define OMPI_SKIP_MPICXX 1  // only the C interface
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>

#include "point_to_point.h"
#include "processes.h"

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;
static constexpr size_t piece_bytes = size_t(1) << 28;  // the largest MPI message, because its count is an int
static constexpr Seconds shortest_sleep(5e-6), longest_sleep(2e-3), watchdog_period(0.1), answers_within(5);

std::string mpi_library() {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(text, &length);  // needs no MPI_Init
    return std::string(text).substr(0, std::string(text).find_first_of(",\n"));
}

static void check_mpi(int code) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, text, &length);
    die("MPI: %s\n  fix: see the messages of mpirun and of the other ranks for the cause", text);
}

namespace {

// Carries the messages among the watchdogs of all ranks, separately from the communicators' messages. Every MPI call holds the mutex `mpi`, and no
// call lasts long. So only one thread at a time calls MPI, although the watchdog has its own thread.
class MpiLine {
  public:
    enum Kind { ask, tell };  // asks for a rank's current call; answers
    struct Word {
        int kind, from;
        std::string text;
    };
    explicit MpiLine(std::mutex &mpi) : mpi_(mpi) { check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &comm_)); }

    void send(int kind, int to, const std::string &text) {
        std::lock_guard lock(mpi_);
        MPI_Send(text.data(), int(text.size()), MPI_BYTE, to, kind, comm_);
    }

    bool receive(Word &word) {
        std::lock_guard lock(mpi_);
        MPI_Status status;
        int there = 0, length = 0;
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &there, &status);
        if (!there) return false;
        MPI_Get_count(&status, MPI_BYTE, &length);
        word = {status.MPI_TAG, status.MPI_SOURCE, std::string(size_t(length), '\0')};
        MPI_Recv(word.text.data(), length, MPI_BYTE, word.from, word.kind, comm_, MPI_STATUS_IGNORE);
        return true;
    }

    // Prints the message and ends this process, which ends the run on all ranks. Any thread may call it.
    [[noreturn]] void end_everywhere(const std::string &message) {
        say_last(message);  // does not wait for the other thread
        MPI_Abort(MPI_COMM_WORLD, 1);
        abort();
    }

  private:
    std::mutex &mpi_;
    MPI_Comm comm_;
};

// A thread that reports this rank's call when another rank asks. If this rank has waited too long, it asks all ranks, and then ends the run.
// So the ranks' last calls are known even if a rank never returns from its own work.
class Watchdog {
  public:
    Watchdog(MpiLine &line, int rank, int ranks, double timeout);
    ~Watchdog();
    void enter(const Stamp &stamp);
    void waits(bool waits);

  private:
    std::string state();
    void watch();

    MpiLine &line_;
    const int rank_, ranks_;
    const double timeout_;
    std::mutex mutex_;
    std::condition_variable wake_;
    Stamp state_;
    bool waits_ = false, stop_ = false;
    Clock::time_point since_;
    std::thread thread_;
};

Watchdog::Watchdog(MpiLine &line, int rank, int ranks, double timeout)
    : line_(line), rank_(rank), ranks_(ranks), timeout_(timeout) {
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

// If several ranks have waited too long, the lowest one reports.
void Watchdog::watch() {
    std::vector<std::string> states(static_cast<size_t>(ranks_));  // empty if the rank has not answered
    bool asked = false, lower_asks = false;
    Clock::time_point asked_at;
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, watchdog_period, [&] { return stop_; })) {
        const bool too_long = waits_ && Clock::now() - since_ > Seconds(timeout_);
        lock.unlock();
        for (MpiLine::Word word; line_.receive(word);) {
            if (word.kind == MpiLine::tell) states[size_t(word.from)] = word.text;
            else line_.send(MpiLine::tell, word.from, state()), lower_asks = lower_asks || word.from < rank_;
        }
        if (too_long && !asked && !lower_asks) {
            asked = true, asked_at = Clock::now();
            for (int r = 0; r < ranks_; r++)
                if (r == rank_) states[size_t(r)] = state();
                else line_.send(MpiLine::ask, r, "");
        }
        const bool all_answered = std::count(states.begin(), states.end(), "") == 0;
        if (asked && !lower_asks && (all_answered || Clock::now() - asked_at > answers_within))
            line_.end_everywhere(hung_message(rank_, timeout_, states));
        lock.lock();
    }
}

class MpiTransport final : public Transport {
  public:
    MpiTransport(std::mutex &mpi, Watchdog &watchdog) : mpi_(mpi), watchdog_(watchdog) {}

    uint64_t post(int tag, const void *send, size_t send_bytes, int to, void *recv, size_t recv_bytes, int from,
                  const SliceMemory &) override {
        std::lock_guard lock(mpi_);
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
            std::lock_guard lock(mpi_);
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
        std::lock_guard lock(mpi_);
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

    // Polls with sleeps that grow with the waiting time: they add at most an eighth to it, and a waiting rank leaves its core to others.
    template <class F> void wait_until(F test) {
        if (test()) return;
        watchdog_.waits(true);
        const auto start = Clock::now();
        do std::this_thread::sleep_for(std::clamp<Seconds>((Clock::now() - start) / 8, shortest_sleep, longest_sleep));
        while (!test());
        watchdog_.waits(false);
    }

    std::mutex &mpi_;
    Watchdog &watchdog_;
    uint64_t last_id_ = 0;
    std::map<uint64_t, Pending> pending_;
};

}  // namespace

int run_mpi(const CommOptions &options, const std::function<int(Comm &)> &f) {
    int provided = 0, rank = 0, ranks = 0;
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided) != MPI_SUCCESS)
        die("MPI does not start\n  fix: start it by mpirun of the MPI it was built with");
    struct Finalize {
        ~Finalize() { MPI_Finalize(); }
    } finalize;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (ranks == 1) expect_to_be_alone();
    std::mutex mpi;
    MpiLine line(mpi);
    if (provided < MPI_THREAD_SERIALIZED)
        line.end_everywhere("this MPI allows calls from one thread only\n  fix: use one with MPI_THREAD_SERIALIZED");
    Watchdog watchdog(line, rank, ranks, options.timeout);
    MpiTransport transport(mpi, watchdog);
    std::vector<int> members(static_cast<size_t>(ranks));
    std::iota(members.begin(), members.end(), 0);
    PointToPointComm comm(transport, members, rank, 0);
    comm.check = options.check;
    return run_process(comm, f, [&](const std::string &message) { line.end_everywhere(message); });
}
#endif
