// The sharded optimizer compared with an unsharded one on one rank, on tensors of uneven sizes.
#include "../llmc/parallel/optimizer.h"

#include <mutex>

#include "check.h"
#include "gathered.h"
#include "late_comm.h"

static constexpr size_t steps = 3, samples = 24;  // a step sums 24 gradients, over ranks and micro-steps
static constexpr size_t row = 5, bucket_bytes = 4 * 400;
static constexpr double max_norm = 1;

// An embedding larger than a bucket, layers with norms between and behind matrices, and a bucket of one element. Tensors of a layer with weight
// decay are matrices for Muon.
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
    Moments moments = Moments::f32;
    bool rounds = false;  // gradients are stored in bf16
    float unit = 1;       // factor of the gradients: with 257 they have more bits than a bf16
    bool muon = false;
};

// The gradient of a sample: small integers, whose sums are exact and so have the same bits in any order.
static float gradient(const Case &c, size_t step, size_t sample, size_t element) {
    static const std::vector<float> all = [] {
        std::vector<float> out(steps * samples * fake.count);
        for (size_t i = 0; i < out.size(); i++) out[i] = float(std::lrint(8 * Random{7, Purpose::test, 0}.normal(i)));
        return out;
    }();
    return c.unit * all[((step - 1) * samples + sample) * fake.count + element];
}

static float initial(size_t element) { return float(std::sin(double(element + 1))); }

static AdamW setting(size_t step, double norm) { return {1e-2, 0.9, 0.999, 1e-8, 0.1, std::min(1.0, max_norm / norm), step}; }

// Of all ranks, by global offset.
struct State {
    std::vector<float> params, master, m, v;
    std::vector<float> grads;  // sum of the last step
    std::vector<double> norms;
    size_t copied = 0;  // bytes copied by all communicators

    State() : params(fake.count), master(fake.count), m(fake.count), v(fake.count), grads(fake.count) {}
};

// Expects the same bits of everything that an update changes.
static void expect_same_update(const State &got, const State &want) {
    EXPECT_EQ(got.norms, want.norms);
    for (const auto member : {&State::master, &State::params, &State::m, &State::v}) EXPECT_EQ(got.*member, want.*member);
}

static double norm_of(const std::vector<float> &x) {
    double sum = 0;
    for (float e : x) sum += double(e) * double(e);
    return std::sqrt(sum);
}

// One rank, without buckets and shards.
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

template <class X>
void backward(Zero<Cpu<X>> &zero, Comm &comm, Memory &memory, std::vector<float> *buffers, const Case &c, size_t step,
              size_t micro) {
    const Sharding &s = zero.sharding;
    zero.gradients.rounding_key = step * 10 + micro;
    for (size_t b = s.buckets.size(); b-- > 0;) {
        float *const to = zero.gradients.in_buffers() ? buffers[b % 2].data() : zero.gradients.floats + s.buckets[b].begin;
        zero.gradients.start(comm, memory, b, to);
        for (size_t sample = size_t(comm.rank + c.ranks * int(micro)); sample < samples;
             sample += size_t(c.ranks) * c.micro_steps)
            for (size_t i = 0; i < s.buckets[b].count; i++) to[i] += gradient(c, step, sample, s.buckets[b].global + i);
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
        Zero<Cpu<X>> zero({1, context.get()}, Sharding(fake.units, c.stage, c.ranks, comm.rank, bucket_bytes, aligned),
                          fake.table, c.rounds);
        HostMemory memory;
        Plan plan;
        Optimizer<Cpu<X>> optimizer;
        optimizer.plan(plan, zero, c.moments, 0, c.muon);
        plan.place(true);
        Arena arena(plan, memory);
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
            optimizer.update(zero, comm, memory, setting(step, norms.back()));
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
            copy_moment(part, part.m, out.m);
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

// Bytes sent in a step by the formulas of zero.h, plus those that communicators copy: a rank copies its own part of a sum in and out.
template <class X> size_t bytes_copied(const Case &c) {
    const Sharding s(fake.units, c.stage, c.ranks, 0, bucket_bytes);
    const size_t W = size_t(c.ranks), x = sizeof(X), padded = s.parts * s.shard_count;  // without the padding before a unit
    if (s.stage == 0) return (W - 1) * 2 * 4 * fake.count + 2 * 4 * fake.count;
    if (s.stage == 1) return (W - 1) * (4 + x) * padded + 2 * 4 * padded;
    if (s.stage == 3)
        return (W - 1) * 4 * c.micro_steps * padded + (2 + 1) * 4 * c.micro_steps * padded;    // the model gathers weights
    return (W - 1) * (4 * c.micro_steps + x) * padded + (2 + 1) * 4 * c.micro_steps * padded;  // also for the start of a bucket
}

class ZeroRuns : public testing::TestWithParam<std::tuple<int, int, size_t>> {
  protected:
    Case make_case() const {
        const auto [ranks, stage, micro_steps] = GetParam();
        return {ranks, stage, micro_steps};
    }
};

// Moments in bf16 are rounded stochastically, by random bits that do not depend on the ranks.
TEST_P(ZeroRuns, ExactSumsGiveTheBitsOfOneRank) {
    const auto expect = [&]<class X>(X, Moments moments, bool late) {
        Case c = make_case();
        c.moments = moments;
        const State got = sharded_run<X>(c, late), want = flat_run<X>(c);
        EXPECT_EQ(got.grads, want.grads);
        expect_same_update(got, want);
        EXPECT_EQ(got.copied, steps * bytes_copied<X>(c));
    };
    for (const Moments moments : {Moments::f32, Moments::bf16}) expect(float(), moments, false), expect(bf16(), moments, true);
}

// The blocks of 8-bit moments do not depend on the ranks. Moments of norms and biases are floats.
TEST_P(ZeroRuns, MomentsInBlocksGiveTheBitsOfOneRank) {
    Case c = make_case(), one{1, 0, c.micro_steps};
    c.moments = one.moments = Moments::blockwise;
    const State got = sharded_run<bf16>(c), floats = flat_run<bf16>(one);
    expect_same_update(got, sharded_run<bf16>(one));
    EXPECT_NE(got.m, floats.m);
    for (const Tensor &t : fake.table)
        for (size_t i = t.offset; !t.decay && i < t.offset + t.count; i++) EXPECT_EQ(got.m[i], floats.m[i]) << t.name;
}

// Each matrix is orthogonalised from the same numbers, on one rank or on all. AdamW updates tensors outside of layers. Matrices of layers have no v.
TEST_P(ZeroRuns, MuonGivesTheBitsOfOneRank) {
    const auto expect = [&]<class X>(X, Moments moments, bool late) {
        Case c = make_case(), one{1, 0, c.micro_steps};
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

// bf16 stores gradients of few bits exactly. Sums of more bits are rounded once in a step of one micro-step, by random bits that do not depend on
// the ranks.
TEST_P(ZeroRuns, Bf16GradientsOfOneMicroStepGiveTheBitsOfOneRank) {
    Case c = make_case(), one{1, 0, 1};
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

INSTANTIATE_TEST_SUITE_P(Zero, ZeroRuns,
                         testing::Combine(testing::Values(1, 3, 8), testing::Values(0, 1, 2, 3),
                                          testing::Values(size_t(1), size_t(3))),
                         [](const auto &info) {
                             const auto &p = info.param;
                             return format("ranks%d_stage%d_micro%zu", std::get<0>(p), std::get<1>(p), std::get<2>(p));
                         });

TEST(Zero, LargeUnitIsDividedIntoBucketsOfWholeRows) {
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
