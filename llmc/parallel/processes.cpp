#include "processes.h"

#include <chrono>
#include <exception>
#include <optional>
#include <thread>

void say_last(const std::string &message) {
    fflush(stdout);
    if (!message.empty()) fprintf(stderr, "%s\n", message.c_str());
    fflush(stderr);
}

int run_process(Comm &comm, const std::function<int(Comm &)> &f, const std::function<void(const std::string &)> &end_everywhere) {
    int result = 1;
    std::optional<AgreedError> agreed;
    try {
        try {
            result = f(comm);
        } catch (const AgreedError &error) {
            if (error.ranks < comm.size) throw;
            agreed = error;
        }
        comm.barrier();  // an early rank sleeps here
    } catch (const std::exception &error) {
        end_everywhere(format("rank %d: %s", comm.rank, message_of(error).c_str()));
    }
    if (comm.rank == 0 && agreed) throw *agreed;
    // Rank 0 prints the message first: the end of a failed process ends the others, and Open MPI 5 drops their last lines.
    if (agreed) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    return result;
}
