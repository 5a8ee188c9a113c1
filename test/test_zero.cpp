// The sharded optimizer against a flat one of a single rank, on a table whose tensors have awkward sizes.
#include "../llmc/parallel/optimizer.h"

#include <mutex>

#include "check.h"
#include "errors.h"
#include "gathered.h"
#include "late_comm.h"

static constexpr size_t steps = 3, samples = 24;  // 24 gradients are summed in a step, over ranks and micro-steps
static constexpr size_t row = 5, bucket_bytes = 4 * 400;
static constexpr double max_norm = 1;

// An embedding that is too large for a bucket, layers with norms between and behind matrices, a bucket of one element. What decays in a layer is a
// matrix of these shapes, for Muon.
struct Fake {
    std::vector<Tensor> table;
    std::vector<Unit> units;
    size_t count = 0;

    Fake() {
        add({{1501, true}}, row);
        add({{37, true}, {300, false}, {5, true}, {1, false}});
        add({{1, true}});
        add({{1000, true}, {129, true}, {64, false}, {3, false}});
        add({{703, true}}, row);
        add({{97, false}});
    }

  private:
    void add(const std::vector<std::pair<size_t, bool>> &tensors, size_t row = 0) {
        const size_t begin = count;
        for (const auto &[n, decay] : tensors) {
            const size_t rows = n == 1000 ? 25 : n == 129 ? 43 : n == 5 ? 5 : 1;
            const bool of_layer = decay && row == 0;
            const std::string name = format("tensor.%zu", table.size());
            table.push_back({name, {rows, n / rows}, Tensor::normal, decay, count, n, false, of_layer, of_layer});
            count += n;
        }
        units.push_back({begin, count, row});
    }
};
static const Fake fake;

struct Case {
    int ranks, stage;
    size_t micro_steps;
    bool exact;  // gradients are small integers, whose sums have no roundings: the bits of one rank in any order
    Moments moments = Moments::f32;
    bool rounds = false;  // gradients are stored in bf16
    float unit = 1;       // of exact gradients: 257 of them have more bits than a bf16
    bool away = false;    // parameters are in a store, and so are moments
    bool muon = false;
};

// What the samples of a step add to the gradient, (steps, samples, count). Not exact: of one sign in all, so that sums do not cancel.
static std::vector<float> make_gradients(bool exact) {
    std::vector<float> out(steps * samples * fake.count);
    for (size_t i = 0; i < out.size(); i++) {
        const double x = Random{7, Purpose::test, 0}.normal(i);
        const float sign = i % fake.count % 3 ? 1.0f : -1.0f;
        out[i] = exact ? float(std::lrint(8 * x)) : sign * float(1 + 0.1 * std::clamp(x, -4.0, 4.0));
    }
    return out;
}

static float gradient(const Case &c, size_t step, size_t sample, size_t element) {
    static const std::vector<float> exact = make_gradients(true), inexact = make_gradients(false);
    return c.unit * (c.exact ? exact : inexact)[((step - 1) * samples + sample) * fake.count + element];
}

static float initial(size_t element) { return float(std::sin(double(element + 1))); }

static AdamW setting(size_t step, double norm) { return {1e-2, 0.9, 0.999, 1e-8, 0.1, std::min(1.0, max_norm / norm), step}; }

// By global offsets.
struct State {
    std::vector<float> params, master, m, v;
    std::vector<float> grads;  // of the last step, summed
    std::vector<double> norms;
    size_t copied = 0;  // bytes that all communicators brought somewhere

    State() : params(fake.count), master(fake.count), m(fake.count), v(fake.count), grads(fake.count) {}
};

// The same bits of all that an update changes.
static void expect_same_update(const State &got, const State &want) {
    EXPECT_EQ(got.norms, want.norms);
    EXPECT_EQ(got.master, want.master);
    EXPECT_EQ(got.params, want.params);
    EXPECT_EQ(got.m, want.m);
    EXPECT_EQ(got.v, want.v);
}

static double norm_of(const std::vector<float> &x) {
    double sum = 0;
    for (float e : x) sum += double(e) * double(e);
    return std::sqrt(sum);
}

// One rank, without buckets.
template <class X> State flat_run(const Case &c) {
    State s;
    const CpuF32 dev{1};
    std::vector<bf16> m16(fake.count, bf16(0.0f)), v16 = m16;
    for (size_t i = 0; i < fake.count; i++) s.master[i] = initial(i);
    for (size_t step = 1; step <= steps; step++) {
        std::fill(s.grads.begin(), s.grads.end(), 0.0f);
        for (size_t sample = 0; sample < samples; sample++)
            for (size_t i = 0; i < fake.count; i++) s.grads[i] += gradient(c, step, sample, i);
        s.norms.push_back(norm_of(s.grads));
        for (const Tensor &t : fake.table) {
            AdamW a = setting(step, s.norms.back());
            if (!t.decay) a.weight_decay = 0;
            float *const p = &s.master[t.offset];
            a.first = t.offset;
            if (c.moments == Moments::bf16)
                adamw_update(dev, Floats<float>{p}, &m16[t.offset], &v16[t.offset], &s.grads[t.offset], a, t.count);
            else adamw_update(dev, Floats<float>{p}, &s.m[t.offset], &s.v[t.offset], &s.grads[t.offset], a, t.count);
        }
    }
    if (c.moments == Moments::bf16) s.m.assign(m16.begin(), m16.end()), s.v.assign(v16.begin(), v16.end());
    for (size_t i = 0; i < fake.count; i++) s.params[i] = float(Floats<X>::round(s.master[i]));
    return s;
}

// Adds what this rank's samples of a micro-step give to bucket b.
static void add_gradients(const Case &c, int rank, size_t step, size_t micro, const Bucket &b, float *to) {
    for (size_t sample = size_t(rank) + micro * size_t(c.ranks); sample < samples; sample += size_t(c.ranks) * c.micro_steps)
        for (size_t i = 0; i < b.count; i++) to[i] += gradient(c, step, sample, b.global + i);
}

template <class X>
void backward(Zero<Cpu<X>> &zero, Comm &comm, Memory &memory, std::vector<float> *buffers, const Case &c, size_t step,
              size_t micro) {
    const Sharding &s = zero.sharding;
    zero.gradients.rounding_key = step * 10 + micro;
    for (size_t b = s.buckets.size(); b-- > 0;) {
        float *const to = zero.gradients.in_buffers() ? buffers[b % 2].data() : zero.gradients.floats + s.buckets[b].begin;
        zero.gradients.start(comm, memory, b, to);
        add_gradients(c, comm.rank, step, micro, s.buckets[b], to);
        zero.gradients.reduce(comm, b, to, micro + 1 == c.micro_steps);
    }
    if (zero.gradients.in_buffers()) zero.gradients.finish(comm);
}

template <class X> State sharded_run(const Case &c, bool late = false) {
    State out;
    std::mutex mutex;  // of `out`
    run_threads(c.ranks, {.check = true}, [&](Comm &threads) {
        size_t copied = 0;
        threads.memory.copy = [&](void *to, const void *from, size_t bytes) { memcpy(to, from, bytes), copied += bytes; };
        LateComm late_comm(threads);
        Comm &comm = late ? static_cast<Comm &>(late_comm) : threads;
        const size_t aligned = c.moments == Moments::blockwise ? Blockwise::size : 8;
        const ContextPtr context = make_context();
        Zero<Cpu<X>> zero({1, context.get()}, Sharding(fake.units, c.stage, c.ranks, comm.rank, bucket_bytes, aligned, c.away),
                          fake.table, c.rounds, c.away);
        HostMemory memory;
        Plan plan;
        Optimizer<Cpu<X>> optimizer;
        optimizer.plan(plan, zero, c.moments, c.away, c.muon);
        plan.place(true);
        Arena arena(plan, memory);
        std::unique_ptr<Store> store;
        if (c.away) {
            store = make_disk_store(testing::TempDir(), plan.store_bytes(), 60);
            zero.pieces.use(*store, memory), optimizer.use(*store, memory);
        }

        zero.set_runs([&](const ShardRun &s) {
            for (size_t i = 0; i < s.count; i++) zero.params_at(s).store(i, initial(s.global + i));
        });
        zero.gather(comm);
        zero.ready(comm, 0, zero.sharding.elements);
        copied = 0;
        std::vector<float> buffers[2];
        for (auto &buffer : buffers) buffer.assign(zero.sharding.largest, NAN);
        std::vector<double> norms;
        for (size_t step = 1; step <= steps; step++) {
            zero.gradients.clear(memory, true);
            for (size_t micro = 0; micro < c.micro_steps; micro++) backward(zero, comm, memory, buffers, c, step, micro);
            norms.push_back(zero.gradients.norm(comm, memory));
            optimizer.update(zero, comm, setting(step, norms.back()));
        }
        arena.check_guards();

        zero.ready(comm, 0, zero.sharding.elements);
        const size_t copied_in_steps = copied;
        const auto gathered = gather_units(zero, comm, fake.units);
        std::lock_guard lock(mutex);
        out.copied += copied_in_steps;
        read_own_floats(zero, out.master);
        for (const ShardRun &s : zero.sharding.shard_runs())
            std::visit([&](const auto *grads) { std::copy_n(grads, s.count, &out.grads[s.global]); }, zero.gradients.at(s));
        const auto copy_moment = [&](const OptimizerPart &part, const AnyFloats &moment, std::vector<float> &to) {
            const auto values = std::visit([&](auto m) { return read_floats(memory, m, part.count); }, moment);
            std::copy(values.begin(), values.end(), &to[part.global]);
        };
        const OptimizerState state = optimizer.state(zero, memory);
        for (const OptimizerPart &part : state.parts) {
            state.open(part), copy_moment(part, part.m, out.m);
            if (part.has_v) copy_moment(part, part.v, out.v);
        }
        const std::vector<float> params = params_of(zero, gathered, fake.units);
        if (out.norms.empty()) out.params = params, out.norms = norms;
        EXPECT_EQ(out.params, params) << "of rank " << comm.rank;
        EXPECT_EQ(out.norms, norms) << "of rank " << comm.rank;
        return 0;
    });
    return out;
}

// Bytes that move in a step, as zero.h says, and what communicators copy besides: to sum, a rank copies its own part in and out.
template <class X> size_t bytes_copied(const Case &c) {
    const Sharding s(fake.units, c.stage, c.ranks, 0, bucket_bytes);
    const size_t W = size_t(c.ranks), x = sizeof(X), padded = s.parts * s.shard_count;  // padding before a unit is not sent
    if (s.stage == 0) return (W - 1) * 2 * 4 * fake.count + 2 * 4 * fake.count;
    if (s.stage == 1) return (W - 1) * (4 + x) * padded + 2 * 4 * padded;
    if (s.stage == 3) return (W - 1) * 4 * c.micro_steps * padded + (2 + 1) * 4 * c.micro_steps * padded;  // the model gathers
    return (W - 1) * (4 * c.micro_steps + x) * padded + (2 + 1) * 4 * c.micro_steps * padded;  // and to start a bucket
}

class ZeroRuns : public testing::TestWithParam<std::tuple<int, int, size_t>> {
  protected:
    Case make_case(bool exact) const {
        const auto [ranks, stage, micro_steps] = GetParam();
        return {ranks, stage, micro_steps, exact};
    }
};

template <class X> void expect_one_ranks_bits(const Case &c, bool late = false) {
    const State got = sharded_run<X>(c, late), want = flat_run<X>(c);
    EXPECT_EQ(got.grads, want.grads);
    expect_same_update(got, want);
    EXPECT_EQ(got.copied, steps * bytes_copied<X>(c));
}

TEST_P(ZeroRuns, ExactSumsGiveTheBitsOfOneRank) {
    expect_one_ranks_bits<float>(make_case(true));
    expect_one_ranks_bits<bf16>(make_case(true));
}

TEST_P(ZeroRuns, AStoreGivesTheBitsOfMemory) {
    for (Moments moments : {Moments::f32, Moments::bf16, Moments::blockwise}) {
        Case c = make_case(true);
        c.moments = moments;
        const State want = sharded_run<bf16>(c);
        c.away = true;
        expect_same_update(sharded_run<bf16>(c, true), want);
    }
}

TEST_P(ZeroRuns, RandomRoundingOfMomentsGivesTheBitsOfOneRank) {
    Case c = make_case(true);
    c.moments = Moments::bf16;
    expect_one_ranks_bits<float>(c);
    expect_one_ranks_bits<bf16>(c);
}

// No block of moments in 8 bits depends on the ranks. Its numbers equal the float moments' but for half a step between fractions, at most 1/57 of
// a number that is not tiny compared with the largest of its block.
TEST_P(ZeroRuns, MomentsInBlocksGiveTheBitsOfOneRank) {
    Case c = make_case(true), one{1, 0, c.micro_steps, true};
    c.moments = one.moments = Moments::blockwise;
    const State got = sharded_run<bf16>(c), want = sharded_run<bf16>(one), floats = flat_run<bf16>(one);
    expect_same_update(got, want);
    for (const Tensor &t : fake.table)
        for (size_t i = t.offset; i < t.offset + t.count; i++) {
            if (!t.decay) {
                EXPECT_EQ(got.m[i], floats.m[i]) << "norms and biases stay floats";
            }
            ASSERT_NEAR(got.master[i], floats.master[i], steps * 2e-2) << i;
        }
    EXPECT_NE(got.m, floats.m);
}

// A matrix is on one rank or on all of them, and is orthogonalised from the same numbers. What is not a layer's is AdamW's, and a layer's matrix has no v.
TEST_P(ZeroRuns, MuonGivesTheBitsOfOneRank) {
    const auto expect = [&]<class X>(X, Moments moments, bool late) {
        Case c = make_case(true), one{1, 0, c.micro_steps, true};
        c.moments = one.moments = moments, c.muon = one.muon = true;
        const State got = sharded_run<X>(c, late), want = sharded_run<X>(one);
        one.muon = false;
        const State adamw = sharded_run<X>(one);
        expect_same_update(got, want);
        for (const Tensor &t : fake.table)
            for (size_t i = t.offset; i < t.offset + t.count; i++) {
                ASSERT_EQ(got.master[i] == adamw.master[i], !t.of_layer) << t.name;
                ASSERT_EQ(got.v[i] == 0, t.of_layer) << t.name;
            }
    };
    expect(float(), Moments::f32, false);
    expect(bf16(), Moments::bf16, true);
}

// Stored in bf16, gradients of few bits are exact. Sums of more bits are rounded once in a step of one micro-step, by bits that do not depend on the ranks.
TEST_P(ZeroRuns, Bf16GradientsOfOneMicroStepGiveTheBitsOfOneRank) {
    Case c = make_case(true), one{1, 0, 1, true};
    c.rounds = one.rounds = true;
    const State floats = flat_run<bf16>(c), exact = sharded_run<bf16>(c, true);
    EXPECT_EQ(exact.grads, floats.grads);
    EXPECT_EQ(exact.norms, floats.norms);
    EXPECT_EQ(exact.master, floats.master);
    c.unit = one.unit = 257, c.micro_steps = 1;
    const State got = sharded_run<bf16>(c, true), want = sharded_run<bf16>(one);
    EXPECT_EQ(got.grads, want.grads);
    expect_same_update(got, want);
    EXPECT_NE(got.grads, flat_run<bf16>(c).grads);
}

// A gradient is off by less than a unit for each rounding of each sum that is added later, none of which is larger than the sum of all magnitudes (the
// gradients of an element are of one sign), and by nothing on average.
TEST_P(ZeroRuns, Bf16GradientsAreRightOnAverage) {
    Case c = make_case(false);
    c.rounds = true;
    const State got = sharded_run<bf16>(c), again = sharded_run<bf16>(c, true), floats = flat_run<bf16>(c);
    EXPECT_EQ(got.grads, again.grads);
    EXPECT_EQ(got.master, again.master);
    const size_t roundings = c.stage >= 2 ? c.micro_steps : (c.micro_steps - 1) * size_t(c.ranks) + 1;
    double off = 0;
    for (size_t i = 0; i < fake.count; i++) {
        const double error = (got.grads[i] - floats.grads[i]) / std::abs(floats.grads[i]);
        ASSERT_LE(std::abs(error), double(roundings) * 0x1p-7) << i;
        off += error / double(fake.count);
    }
    // A rounding's deviation is at most half a unit, 2^-8 of the sum.
    EXPECT_LE(std::abs(off), 5 * 0x1p-8 * std::sqrt(double(roundings) / double(fake.count)));
}

TEST_P(ZeroRuns, SumsMayBeLate) { expect_one_ranks_bits<bf16>(make_case(true), true); }

// Sums in another order. With u = 2^-24 a sum of 24 numbers of one sign is off by at most 23 u of itself, twice that between two
// orders; so is the norm. Then m is off by 2 * 2 * 46 u relative (its own roundings included), sqrt(v) by as much, and an update,
// at most lr * (1 + 1/8) here, by their sum. The parameter, below 1.1, is rounded twice in a step.
template <class X> void expect_near_one_rank(const Case &c) {
    constexpr double u = 0x1p-24, allowed = steps * (1e-2 * 1.125 * 8 * 46 * u + 2 * 2 * 1.1 * u);
    const State got = sharded_run<X>(c), again = sharded_run<X>(c), want = flat_run<X>(c);
    expect_close(format("%s, %d ranks, stage %d", dtype_name<X>, c.ranks, c.stage).c_str(), got.master, want.master, allowed);
    for (size_t i = 0; i < fake.count; i++) ASSERT_EQ(got.params[i], float(Floats<X>::round(got.master[i]))) << i;
    EXPECT_NEAR(got.norms.back(), norm_of(got.grads), 1e-12 * got.norms.back());
    EXPECT_EQ(got.params, again.params);
    EXPECT_EQ(got.master, again.master);
    EXPECT_EQ(got.norms, again.norms);
}

TEST_P(ZeroRuns, AnyOrderOfSumsIsNearOneRankAndTheSameEveryTime) {
    expect_near_one_rank<float>(make_case(false));
    expect_near_one_rank<bf16>(make_case(false));
}

INSTANTIATE_TEST_SUITE_P(Zero, ZeroRuns,
                         testing::Combine(testing::Values(1, 2, 3, 4, 8), testing::Values(0, 1, 2, 3),
                                          testing::Values(size_t(1), size_t(3))),
                         [](const auto &info) {
                             const auto &p = info.param;
                             return format("ranks%d_stage%d_micro%zu", std::get<0>(p), std::get<1>(p), std::get<2>(p));
                         });

// As a tied embedding, which is both head and embedding. The first sum is still under way when its buffer is wanted again.
TEST(Zero, ABucketMayBeReducedMoreThanOnce) {
    run_threads(3, {.check = true}, [](Comm &threads) {
        LateComm comm(threads);
        Zero<CpuF32> zero({1}, Sharding({{0, 50}}, 2, 3, comm.rank, bucket_bytes), {{"tied", {50}, Tensor::normal, true, 0, 50}});
        HostMemory memory;
        Plan plan;
        zero.plan(plan, true);
        zero.gradients.plan_scratch(plan);
        plan.place();
        const Arena arena(plan, memory);
        std::vector<float> buffer(zero.sharding.largest);
        for (int use : {1, 10}) {
            zero.gradients.start(comm, memory, 0, buffer.data());
            for (size_t i = 0; i < 50; i++) buffer[i] += float(use * (comm.rank + 1));
            zero.gradients.reduce(comm, 0, buffer.data(), use == 10);
        }
        zero.gradients.finish(comm);
        for (const ShardRun &s : zero.sharding.shard_runs())
            for (size_t i = 0; i < s.count; i++) EXPECT_EQ(std::get<float *>(zero.gradients.at(s))[i], 11 * (1 + 2 + 3));
        EXPECT_EQ(zero.gradients.norm(comm, memory), std::sqrt(50 * 66.0 * 66.0));
        return 0;
    });
}

// ---- ownership ------------------------------------------------------------------------------------------------------------------------

TEST(Zero, EveryElementIsInOneShard) {
    for (int stage : {0, 1, 2, 3})
        for (int world : {1, 2, 3, 5, 8, 64}) {
            std::vector<int> owners(fake.count);
            const auto table = Sharding(fake.units, stage, world, 0, bucket_bytes).padded(fake.table);
            for (int rank = 0; rank < world; rank++) {
                const Sharding s(fake.units, stage, world, rank, bucket_bytes);
                size_t end = 0, in_update_runs = 0, shard = 0;  // of the buckets so far
                for (const Bucket &b : s.buckets) {
                    const bool first = std::ranges::count(fake.units, b.global, &Unit::begin);  // of its unit
                    EXPECT_EQ(b.begin, first ? round_up(end, Sharding::unit_aligned) : end);
                    EXPECT_EQ(b.shard, shard);
                    EXPECT_LE(b.count, s.parts * b.part);
                    end = b.begin + s.parts * b.part, shard += b.part;
                }
                EXPECT_LE(end, s.count);
                EXPECT_EQ(s.shard_count, shard);
                for (const ShardRun &run : s.shard_runs())
                    for (size_t i = 0; i < run.count; i++) owners[run.global + i]++;
                for (const UpdateRun &run : s.update_runs(table)) {
                    in_update_runs += run.count;
                    for (const Tensor &t : table)
                        if (t.offset < run.flat + run.count && run.flat < t.offset + t.count) {
                            EXPECT_EQ(run.decay, t.decay) << t.name;
                        }
                }
                size_t in_shard_runs = 0;
                for (const ShardRun &run : s.shard_runs()) in_shard_runs += run.count;
                EXPECT_EQ(in_update_runs, in_shard_runs);
            }
            EXPECT_EQ(owners, std::vector<int>(fake.count, stage ? 1 : world)) << "stage " << stage << ", " << world << " ranks";
        }
}

TEST(Zero, LargeBucketsArePiecesOfWholeRows) {
    for (int world : {2, 3, 8}) {
        const Sharding s(fake.units, 2, world, 0, bucket_bytes);
        size_t pieces = 0;
        for (const Bucket &b : s.buckets)
            if (b.global < 1501) {
                EXPECT_EQ(b.global % row, 0u);
                EXPECT_LE(s.parts * b.part * sizeof(float), std::max(bucket_bytes, row * s.multiple() * sizeof(float)));
                EXPECT_EQ(b.begin, b.global);  // no padding between them
                pieces++;
            }
        EXPECT_GE(pieces, 4u);
    }
}

TEST(Zero, CutsGoBetweenTensorsAndLeaveNothingOut) {
    const auto said = [](const std::vector<Unit> &units) {
        return error_of([&] { Sharding(units, 1, 2, 0, bucket_bytes).padded(fake.table); });
    };
    EXPECT_EQ(said(fake.units), "no error");
    EXPECT_EQ(said({{0, 1502}, {1502, fake.count}}), "a unit ends inside tensor.1");
    EXPECT_EQ(said({{0, 1501}, {1502, fake.count}}), "a unit begins at element 1502, but the one before it ends at 1501");
}
