// Ranks as processes; test/python/test_processes.py runs this program.
//   scripts/launch.sh -np 4 build/test/processes/test_processes WHAT
//   build/test/processes/test_processes WHAT RANK RANKS HOST:PORT [TIMEOUT]     one of the ranks
#include <unistd.h>

#include <exception>

#include "../../dev/emulator/emulated_processes.h"
#include "../../llmc/parallel/comm_mpi.h"
#include "../../llmc/parallel/comm_sockets.h"
#include "../comm_checks.h"

// An error occurs during an exchange.
static void fail_during_exchange(Comm &c) {
    std::vector<float> sent(size_t(1) << 24), received(size_t(1) << 24);
    const int to = (c.rank + 1) % c.size, from = (c.rank + c.size - 1) % c.size;
    const Request request = c.exchange({sent.data(), sent.size()}, to, {received.data(), received.size()}, from);
    agree(c, [] { die("no such file"); });
}

// A slice of more bytes than an int can count.
static void broadcast_more_than_2_gib(Comm &c) {
    const size_t count = (size_t(1) << 31) + 12345;
    std::vector<uint8_t> data(count);
    const auto value = [](size_t i) { return uint8_t(i * 0x9e3779b97f4a7c15u >> 56); };
    if (c.rank == 0)
        for (size_t i = 0; i < count; i++) data[i] = value(i);
    c.broadcast({data.data(), count}, 0);
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) wrong += data[i] != value(i);
    EXPECT_EQ(wrong, 0u);
}

static int run(Comm &c, const std::string &what) {
    c.barrier();
    if (what == "calls") comm_checks::everything(c);
    else if (what == "agreement") comm_checks::agreement(c);
    else if (what == "idle") comm_checks::waiting_is_idle(c, 1, RUSAGE_SELF);
    else if (what == "large") broadcast_more_than_2_gib(c);
    else if (what == "throw") {  // one rank fails while the others wait
        if (c.rank == c.size - 1) die("out of luck");
        c.barrier();
    } else if (what == "agree") agree(c, [] { die("no such file"); });
    else if (what == "agree_late") fail_during_exchange(c);
    else if (what == "kill") {
        if (c.rank == c.size - 1) kill(getpid(), SIGKILL);
        c.barrier();
    } else if (what == "kill_first") {  // while the others are outside a call
        if (c.rank == 0) kill(getpid(), SIGKILL);
        sleep(60);
    } else if (what == "hang") {
        if (c.rank == 1) sleep(60);
        c.barrier();
    } else if (what == "stop") {  // a process that cannot answer
        if (c.rank == 1) kill(getpid(), SIGSTOP);
        c.barrier();
    } else die("unknown test: %s", what.c_str());
    if (c.rank == 0) printf("%d ranks: %s done\n", c.size, what.c_str());
    return testing::Test::HasFailure();
}

int main(int argc, char **argv) {
    testing::InitGoogleTest(&argc, argv);
    try {
        const std::string what = argc > 1 ? argv[1] : "calls";
        const auto f = [&](Comm &c) { return run(c, what); };
        CommOptions options{.check = false, .timeout = what == "hang" || what == "stop" ? 2.0 : 120.0};
        if (started_by_mpirun()) return run_mpi(options, f);
        if (argc < 5) die("not started by mpirun");
        if (argc > 5) options.timeout = atof(argv[5]);
        return run_sockets({atoll(argv[2]), atoll(argv[3]), argv[4]}, options, [&](Comm &host) {
            if (what != "calls" && what != "idle") return f(host);
            EmulatedProcesses slices(host);
            return f(slices);
        });
    } catch (const std::exception &error) {
        fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
