// Ranks that are processes: scripts/launch.sh -np 4 build/test/mpi/test_comm_mpi WHAT; test/python/test_mpi.py runs it.
#include <unistd.h>

#include "../../llmc/parallel/comm_mpi.h"
#include "../comm_checks.h"

static int run(Comm &c, const std::string &what) {
    c.barrier();
    if (what == "calls") comm_checks::everything(c);
    else if (what == "idle") comm_checks::waiting_is_idle(c, 2, RUSAGE_SELF);
    else if (what == "throw") {  // one rank ends while the others wait
        if (c.rank == c.size - 1) die("out of luck");
        c.barrier();
    } else if (what == "agree") agree(c, [] { die("no such file"); });
    else if (what == "kill") {
        if (c.rank == c.size - 1) kill(getpid(), SIGKILL);
        c.barrier();
    } else if (what == "hang") {
        if (c.rank == 1) sleep(60);
        c.barrier();
    } else die("unknown test: %s", what.c_str());
    if (c.rank == 0) printf("%d ranks: %s done\n", c.size, what.c_str());
    return testing::Test::HasFailure();
}

int main(int argc, char **argv) {
    testing::InitGoogleTest(&argc, argv);
    try {
        if (!started_by_mpirun()) die("not started by mpirun");
        const std::string what = argc > 1 ? argv[1] : "calls";
        return run_mpi({.check = false, .timeout = what == "hang" ? 2.0 : 120.0}, [&](Comm &c) { return run(c, what); });
    } catch (const std::exception &error) {
        fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
