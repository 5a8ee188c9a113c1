// The matrix of splits, ranks being processes: scripts/launch.sh -np 4 build/test/processes/test_ranks_mpi; test/python/test_processes.py runs it.
#include "../../llmc/parallel/comm_mpi.h"
#include "../models.h"

#include "../rank_cases.h"

// Every rank brings its part of the gradient, and rank 0 compares.
static int equals_one_rank(Comm &comm) {
    RankResult want[experts + 1];
    if (comm.rank == 0)
        for (RankModel model : {untied, tied, gpt2, experts}) want[model] = one_rank(make_device<CpuF32>(1), model);
    size_t number = 0;
    auto cases = third_of(rank_cases(size_t(comm.size)));
    for (const RankCase &c : expert_cases())
        if (c.world == size_t(comm.size) && c.group == 0 && c.micro_steps == 1 && c.stage % 3 == 0) cases.push_back(c);
    for (const RankCase &c : cases) {
        const RankModel model = c.experts > 1 ? experts : rank_model_of(number++);
        RankResult got = empty_result(model);
        rank_step(make_device<CpuF32>(1), comm, c, model, got);
        comm.all_reduce_sum({got.gradient.data(), got.gradient.size()});
        if (comm.rank == 0) check_rank_result(c.name(), got, want[model]);
    }
    if (comm.rank == 0) printf("%d ranks: %zu cases done\n", comm.size, cases.size());
    return testing::Test::HasFailure();
}

int main(int argc, char **argv) {
    testing::InitGoogleTest(&argc, argv);
    try {
        if (!started_by_mpirun()) die("not started by mpirun");
        return run_mpi({.check = false, .timeout = 120}, equals_one_rank);
    } catch (const std::exception &error) {
        fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
