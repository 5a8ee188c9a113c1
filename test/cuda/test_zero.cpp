// The sharded optimizer on CUDA, its ranks threads: the bits of one rank. What it computes is in ../test_zero.cpp.
#include "../../llmc/parallel/optimizer.h"

#include "../../llmc/ops/adamw.cuh"
#include "../../llmc/ops/gradients.cuh"
#include "../../llmc/ops/muon.cuh"
#include "../../llmc/ops/reduce.cuh"
#include "gpu_ranks.cuh"
#include "matmul_context.cuh"

static const std::vector<std::vector<size_t>> shapes = {{5, 7}, {100}, {101, 5}, {20}};
static const std::vector<Unit> units = {{0, 135}, {135, 660}};
static constexpr int samples = 6;  // of small integers, whose sums have no roundings

static std::vector<Tensor> zero_table() {
    std::vector<Tensor> table;
    size_t offset = 0;
    for (const auto &shape : shapes) {
        const bool matrix = shape.size() == 2;  // else it is a norm
        const size_t n = shape[0] * (matrix ? shape[1] : 1);
        table.push_back({format("tensor.%zu", table.size()), shape, Tensor::normal, matrix, offset, n, false, matrix, matrix});
        offset += n;
    }
    return table;
}

// What this rank's samples of a pass add to bucket b.
static void add_samples(const Comm &comm, Memory &memory, const Bucket &b, float *to) {
    auto host = read(memory, to, b.count);
    for (int s = comm.rank; s < samples; s += comm.size)
        for (size_t i = 0; i < b.count; i++) host[i] += float((size_t(s) * 7 + (b.global + i) * 13) % 17) - 8;
    write(memory, to, host);
}

// This rank's parameters after two steps of two passes.
template <class Dev> std::vector<float> train_rank(Dev given, Comm &comm, int stage, bool rounds, bool muon) {
    const int ranks = comm.size;
    MatmulContext context;
    const Dev dev = context.device(given);
    const auto memory = make_memory(dev);
    Zero<Dev> zero(dev, Sharding(units, stage, ranks, comm.rank, 0), zero_table(), rounds);
    float *buffers[2] = {};
    Plan plan;
    Optimizer<Dev> optimizer;
    optimizer.plan(plan, zero, Moments::f32, 0, muon);
    for (float *&buffer : buffers) plan.add(&buffer, "bucket", {zero.sharding.largest});
    typename Dev::X *gathered;
    plan.add(&gathered, "gathered", {zero.sharding.padded_count(0, zero.sharding.elements)});
    plan.place();
    const Arena arena(plan, *memory);
    for (const ShardRun &s : zero.sharding.shard_runs()) write(*memory, zero.params_at(s), std::vector<float>(s.count, 0.5f));
    zero.gather(comm);

    const auto &buckets = zero.sharding.buckets;
    for (size_t step = 1; step <= 2; step++) {
        zero.gradients.clear(*memory, true);
        for (bool last : {false, true})
            for (size_t b = 0; b < buckets.size(); b++) {
                float *const to = zero.gradients.in_buffers() ? buffers[b % 2] : zero.gradients.floats + buckets[b].begin;
                zero.gradients.start(comm, *memory, b, to);
                add_samples(comm, *memory, buckets[b], to);
                zero.gradients.reduce(comm, b, to, last);
            }
        const double norm = zero.gradients.norm(comm, *memory);
        optimizer.update(zero, comm, {1e-2, 0.9, 0.999, 1e-8, 0.1, 1 / norm, step});
    }
    zero.ready(comm, 0, zero.sharding.elements);
    std::vector<float> out;
    for (const Bucket &b : buckets) {
        const bool prefetched = zero.prefetched();
        if (prefetched) zero.fetch(comm, b.global, b.global + b.count, gathered), zero.ready(comm, b.global, b.global + b.count);
        for (auto p : read(*memory, prefetched ? gathered : zero.params + b.begin, b.count)) out.push_back(float(p));
    }
    return out;
}

// Of rank 0.
template <class Dev>
std::vector<float> train(Dev dev, int ranks, int stage, Gpus gpus = Gpus::one, bool rounds = false, bool muon = false) {
    std::vector<float> out;
    run_threads(ranks, {.check = true}, [&](Comm &host) {
        with_gpu(gpus, host, dev, [&](Dev dev, Comm &comm) {
            const auto params = train_rank(dev, comm, stage, rounds, muon);
            if (comm.rank == 0) out = params;
        });
        return 0;
    });
    return out;
}

template <class Dev> struct ZeroOnCuda : testing::Test {};
TYPED_TEST_SUITE(ZeroOnCuda, CudaDevices);

TYPED_TEST(ZeroOnCuda, GivesTheBitsOfOneRank) {
    for_each_order<TypeParam>([&](TypeParam dev) {
        const auto want = train(dev, 1, 0);
        EXPECT_NE(want[0], 0.5f);
        for (int stage : {0, 1, 2, 3}) EXPECT_EQ(train(dev, 3, stage), want) << "stage " << stage;
        for (int stage : {0, 1, 2, 3})  // sums of few bits, which bf16 has
            EXPECT_EQ(train(dev, 3, stage, Gpus::one, true), want) << "in bf16, stage " << stage;
        const auto muon = train(dev, 1, 0, Gpus::one, false, true);
        EXPECT_NE(muon, want);
        for (int stage : {0, 1, 2, 3}) EXPECT_EQ(train(dev, 3, stage, Gpus::one, false, true), muon) << "Muon, stage " << stage;
    });
}

TYPED_TEST(ZeroOnCuda, GivesTheBitsOfOneRankOverGpus) {
    const int ranks = ranks_with_gpus();
    if (ranks < 2) GTEST_SKIP() << "2 GPUs are needed, and NCCL";
    for_each_order_of_streams<TypeParam>([&](TypeParam dev) {
        const auto want = train(dev, 1, 0);
        for (int stage : {0, 1, 2, 3})
            for (bool rounds : {false, true})
                EXPECT_EQ(train(dev, ranks, stage, Gpus::each, rounds), want) << "stage " << stage << ", in bf16: " << rounds;
    });
}
