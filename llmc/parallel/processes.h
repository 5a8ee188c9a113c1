// The watchdog and the end of a run for ranks that are processes, over MPI (comm_mpi.cpp) or sockets (comm_sockets.cpp).
#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "point_to_point.h"

// Carries the messages among the watchdogs of all ranks, apart from those of the communicators.
class Line {
  public:
    enum Kind { ask, tell };  // asks what a rank is doing; tells it
    struct Word {
        int kind, from;
        std::string text;
    };
    virtual ~Line() = default;
    virtual void send(int kind, int to, const std::string &text) = 0;
    virtual bool receive(Word &word) = 0;  // returns false if no message has come
    // Prints the message and ends this process, which ends the run on all ranks. Any thread may call it.
    [[noreturn]] virtual void end_everywhere(const std::string &message) = 0;
};

void say_last(const std::string &message);  // prints the message, for end_everywhere

// A thread that answers what this rank is doing when another asks, and asks all if this one has waited too long; then the run ends.
// So the ranks' last calls are known even if one of them never comes back from its own work.
class Watchdog {
  public:
    Watchdog(Line &line, int rank, int ranks, double timeout);
    ~Watchdog();
    void enter(const Stamp &stamp);
    void waits(bool waits);

  private:
    std::string state();
    void watch();

    Line &line_;
    const int rank_, ranks_;
    const double timeout_;
    std::mutex mutex_;
    std::condition_variable wake_;
    Stamp state_;
    bool waits_ = false, stop_ = false;
    std::chrono::steady_clock::time_point since_;
    std::thread thread_;
};

// Runs f as one of the ranks and returns its result when all have come to its end. An error that all ranks agreed on is thrown from here
// on rank 0, while the others return 1 in silence; any other ends the run on all ranks.
int run_process(Transport &transport, Line &line, int rank, int ranks, const CommOptions &options,
                const std::function<int(Comm &)> &f);
