// The communicator of ranks with a GPU each, concurrent with kernels on the compute stream. The summands are small integers, because NCCL chooses the
// order of a sum.
#include "../../llmc/ops/layout.cuh"
#include "../errors.h"
#include "gpu_ranks.cuh"

namespace {

constexpr size_t count = 10'003;

template <class T> std::vector<T> values(int rank, size_t n) {
    std::vector<T> out(n);
    for (size_t i = 0; i < n; i++) out[i] = T(float((i * 7 + size_t(rank) * 3) % 11));
    return out;
}
template <class T> std::vector<T> sum_of_all(int ranks, size_t n) {
    std::vector<T> out = values<T>(0, n);
    for (int r = 1; r < ranks; r++) {
        const auto v = values<T>(r, n);
        for (size_t i = 0; i < n; i++) out[i] = T(float(out[i]) + float(v[i]));
    }
    return out;
}
template <class T> std::vector<T> part(const std::vector<T> &v, int index, size_t n) {
    return {v.begin() + ptrdiff_t(size_t(index) * n), v.begin() + ptrdiff_t(size_t(index + 1) * n)};
}
template <class T> bool same(const std::vector<T> &a, const std::vector<T> &b) {
    return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * sizeof(T));
}

template <class T> void every_call(Comm &c, size_t n) {
    SCOPED_TRACE(format("rank %d of %d, %zu %s", c.rank, c.size, n, name_of(slice_type<T>)));
    const size_t all = n * size_t(c.size);
    DeviceArray<T> one(values<T>(c.rank, n)), blocks(values<T>(c.rank, all)), scattered(n), gathered(all), crossed(all);
    c.all_gather({one.data(), n}, {gathered.data(), all});
    c.all_to_all({blocks.data(), all}, {crossed.data(), all});
    c.reduce_scatter_sum({blocks.data(), all}, {scattered.data(), n});
    c.all_reduce_sum({one.data(), n});
    const size_t own = size_t(c.rank), few = own + 1;  // a rank sends its number + 1 elements to each rank, and one element twice
    DeviceArray<T> uneven(all), again(1);
    std::vector<Slice> send, recv;
    for (size_t r = 0; r < size_t(c.size); r++) {
        send.emplace_back(blocks.data() + r * n, std::min(few, n)), send.emplace_back(blocks.data() + r * n, size_t(r == own));
        recv.emplace_back(uneven.data() + r * n, std::min(r + 1, n)), recv.emplace_back(again.data(), size_t(r == own));
    }
    c.exchange_all(send, recv);
    for (int r = 0; r < c.size; r++) {
        const size_t received = std::min(size_t(r) + 1, n);
        auto got = part(uneven.values(), r, n), want = part(values<T>(r, all), c.rank, n);
        got.resize(received), want.resize(received);
        EXPECT_TRUE(same(got, want));
    }
    EXPECT_TRUE(same(one.values(), sum_of_all<T>(c.size, n)));
    EXPECT_TRUE(same(scattered.values(), part(sum_of_all<T>(c.size, all), c.rank, n)));
    for (int r = 0; r < c.size; r++) {
        EXPECT_TRUE(same(part(gathered.values(), r, n), values<T>(r, n)));
        EXPECT_TRUE(same(part(crossed.values(), r, n), part(values<T>(r, all), c.rank, n)));
        DeviceArray<T> root(values<T>(c.rank, n));
        c.broadcast({root.data(), n}, r);
        EXPECT_TRUE(same(root.values(), values<T>(r, n)));
    }
}

// x += y on the compute stream
void add(CudaF32 dev, DeviceArray<float> &x, DeviceArray<float> &y) { add_rows(dev, x.data(), count, y.data(), count, 1, count); }

// Kernels run before and after every call, and the host does not wait between them. Rank r's value is r + 1.
void order_with_kernels(CudaF32 dev, Comm &c) {
    const auto filled = [](float x) { return std::vector<float>(count, x); };
    const float own = float(c.rank + 1), sum = float(c.size * (c.size + 1) / 2);
    const int next = (c.rank + 1) % c.size, before = (c.rank + c.size - 1) % c.size;
    DeviceArray<float> x(filled(0)), term(filled(own)), total(filled(0)), received(count), later(filled(0));
    for (int i = 0; i < 20; i++) {
        clear_floats(dev, x.data(), count);
        add(dev, x, term);
        Request hop = c.exchange({x.data(), count}, next, {received.data(), count}, before);
        clear_floats(dev, later.data(), count);
        add(dev, later, term);
        Request sums = c.start([&] { c.all_reduce_sum({later.data(), count}); });
        c.wait(std::move(hop));
        add(dev, total, received);
        c.all_reduce_sum({x.data(), count});
        add(dev, total, x);
        c.wait(std::move(sums));
        add(dev, total, later);
    }
    EXPECT_TRUE(same(total.values(), filled(20 * (float(before + 1) + 2 * sum))));
}

void on_ranks(int ranks, const std::function<void(CudaF32, Comm &)> &f) {
    if (ranks > ranks_with_gpus()) GTEST_SKIP() << ranks << " GPUs are needed, and NCCL";
    for_each_order_of_streams<CudaF32>([&](CudaF32 dev) {
        run_threads(ranks, {.check = true, .timeout = 60}, [&](Comm &host) {
            with_gpu(Gpus::each, host, dev, f);
            return 0;
        });
    });
}

struct GpuComm : testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GpuComm, testing::Values(1, 2, 3));

TEST_P(GpuComm, EveryCall) {
    on_ranks(GetParam(), [](CudaF32, Comm &c) {
        for (size_t n : {size_t(1), size_t(1001)}) {
            every_call<float>(c, n);
            every_call<double>(c, n);
            every_call<bf16>(c, n);
            every_call<int32_t>(c, n);
            every_call<int64_t>(c, n);
            every_call<uint8_t>(c, n);
        }
        c.all_reduce_sum(Slice());
        c.wait(c.exchange({}, -1, {}, -1));
    });
}

TEST_P(GpuComm, IsInOrderWithKernels) { on_ranks(GetParam(), order_with_kernels); }

TEST_P(GpuComm, SplitsAndAgrees) {
    on_ranks(GetParam(), [](CudaF32 dev, Comm &c) {
        const auto backwards = c.split(0, -c.rank), alone = c.split(c.rank, 0);
        EXPECT_EQ(backwards->rank, c.size - 1 - c.rank);
        EXPECT_EQ(alone->size, 1);
        every_call<float>(*backwards, 77);
        every_call<bf16>(*alone, 77);
        order_with_kernels(dev, *backwards);
        EXPECT_EQ(c.sum(int64_t(c.rank)), c.size * (c.size - 1) / 2);
        EXPECT_EQ(backwards->gather(std::to_string(c.rank))[0], std::to_string(c.size - 1));
    });
}

#ifdef LLMC_EMULATE
// The error of a program in which rank r calls calls[r] on its communicator, a second communicator of both ranks, and 64 floats.
using Calls = std::function<void(Comm &, Comm &, float *)>;
std::string error_of_ranks(const Calls &first, const Calls &second) {
    return error_of([&] {
        run_threads(2, {.timeout = 60}, [&](Comm &host) {
            with_gpu(Gpus::each, host, CudaF32{}, [&](CudaF32, Comm &c) {
                const auto other = c.split(0, c.rank);
                DeviceArray<float> x(64);
                (c.rank == 0 ? first : second)(c, *other, x.data());
            });
            return 0;
        });
    });
}

const Calls none = [](Comm &, Comm &, float *) {}, sum_of_5 = [](Comm &c, Comm &, float *x) { c.all_reduce_sum({x, 5}); };

TEST(CudaNccl, FindsCallsThatDiffer) {
    const auto gather = [](Comm &c, Comm &, float *x) { c.all_gather({x + c.rank * 5, 5}, {x, 10}); };
    const auto from = [](int root) { return [=](Comm &c, Comm &, float *x) { c.broadcast({x, 5}, root); }; };
    const struct {
        Calls first, second;
        std::vector<std::string> expected;
    } faults[] = {
        {sum_of_5,
         gather,
         {"ncclAllReduce of 5 f32 (test_gpu_comm.cpp:", "ncclAllGather of 5 f32 (test_gpu_comm.cpp:", "same order"}},
        {sum_of_5,
         [](Comm &c, Comm &, float *x) {
             c.all_reduce_sum({x, 6});
         },
         {"of 5 f32", "of 6 f32"}},
        {sum_of_5,
         [](Comm &c, Comm &, float *x) {
             c.all_reduce_sum({reinterpret_cast<int32_t *>(x), 5});
         },
         {"of 5 f32", "of 5 i32"}},
        {from(0), from(1), {"ncclBroadcast of 5 f32 from rank 0", "ncclBroadcast of 5 f32 from rank 1"}},
        {sum_of_5, none, {"rank 0 waits for rank 1 at ncclAllReduce of 5 f32", "has ended the communicator"}},
        {[](Comm &c, Comm &, float *x) {
             c.wait(c.exchange({x, 5}, 1, {}, -1));
         },
         [](Comm &c, Comm &, float *x) {
             c.wait(c.exchange({}, -1, {x, 6}, 0));
         },
         {"rank 0 is at ncclSend of 5 f32", "rank 1, which is at ncclRecv of 6 f32"}},
        {[](Comm &c, Comm &, float *x) {
             c.wait(c.exchange({x, 5}, 1, {}, -1));
         },
         [](Comm &c, Comm &, float *x) {
             c.wait(c.exchange({}, -1, {reinterpret_cast<int32_t *>(x), 5}, 0));
         },
         {"ncclSend of 5 f32", "ncclRecv of 5 i32"}},
        {[](Comm &c, Comm &, float *x) {
             c.wait(c.exchange({x, 5}, 1, {}, -1));
         },
         none,
         {"waits for rank 1 at ncclSend of 5 f32"}},
        {[](Comm &c, Comm &other, float *x) {
             sum_of_5(c, other, x), other.all_reduce_sum({x, 7});
         },
         [](Comm &c, Comm &other, float *x) {
             other.all_reduce_sum({x, 7}), sum_of_5(c, other, x);
         },
         {"ranks wait for each other", "rank 0 of 2 is at ncclAllReduce of 5", "rank 1 of 2 is at ncclAllReduce of 7"}},
    };
    for (const auto &[first, second, expected] : faults) expect_contains(error_of_ranks(first, second), expected);
    EXPECT_EQ(error_of_ranks(sum_of_5, sum_of_5), "no error");
}

TEST(CudaNccl, FindsWrongCallsOfOneRank) {
    const auto both = [](const Calls &calls) { return error_of_ranks(calls, calls); };
    expect_contains(both([](Comm &c, Comm &, float *x) {
                        c.all_gather({x + 1, 5}, {x, 10});
                    }),
                    {"slices of ncclAllGather", "overlap"});
    expect_contains(both([](Comm &c, Comm &, float *x) { c.reduce_scatter_sum({x, 10}, {x + 2, 5}); }), {"overlap"});
    expect_contains(both([](Comm &c, Comm &, float *x) {
                        c.wait(c.exchange({x, 5}, 1 - c.rank, {x + 4, 5}, 1 - c.rank));
                    }),
                    {"slices of ncclRecv", "overlap"});
    const CudaStream urgent(StreamPriority::urgent), second(StreamPriority::urgent), normal;
    float x = 1;
    ncclUniqueId id;
    ncclComm_t alone, again;
    ncclGetUniqueId(&id), ncclCommInitRank(&alone, 1, id, 0);
    const auto sum = [&](cudaStream_t stream) { ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, alone, stream); };
    sum(urgent);
    expect_error([&] { sum(normal); }, {"a stream of normal priority"});
    expect_error([&] { sum(second); }, {"rank 0 calls NCCL on two streams"});
    expect_error([&] { ncclSend(&x, 1, ncclFloat32, 0, alone, urgent); }, {"ncclSend of 1 f32", "not in a group"});
    expect_error([&] { ncclCommInitRank(&again, 2, id, 1); }, {"rank 1 of 2 joins a communicator of 1 ranks"});
    ncclCommDestroy(alone);
}
#endif

}  // namespace
