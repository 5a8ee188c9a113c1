// Loading and saving parameters: in float and bf16, transposed tensors, and a reward model made from a language model.
#include "../llmc/model/parameters.h"

#include <bit>
#include <mutex>

#include "check.h"
#include "errors.h"
#include "gathered.h"

namespace fs = std::filesystem;

static constexpr size_t C = 50;

// A bucket of rows and a small bucket; the head is not the last tensor.
static const std::vector<Tensor> table = {{"embed", {7, C}, Tensor::normal, true, 0, 7 * C},
                                          {"score.weight", {1, C}, Tensor::score, true, 7 * C, C},
                                          {"norm", {C}, Tensor::ones, false, 8 * C, C},
                                          {"conv", {6, C / 2}, Tensor::residual, true, 9 * C, 3 * C, true}};
static const std::vector<Unit> units = {{0, 7 * C, C}, {7 * C, 12 * C, 0}};

// "conv" in the layout of the file, transposed.
static std::vector<float> in_file(const std::vector<float> &conv) {
    std::vector<float> out;
    for (size_t column = 0; column < C / 2; column++)
        for (size_t row = 0; row < 6; row++) out.push_back(conv[row * C / 2 + column]);
    return out;
}

// Every third value is halfway between two bf16.
static std::vector<float> with_ties(std::vector<float> values) {
    for (size_t i = 0; i < values.size(); i += 3) values[i] = 1 + float(i % 128 * 2 + 1) / 256;
    return values;
}

// The initial master weights: the floats of the file, but in bf16 those halfway between two values change so that they round to even, as
// elsewhere, and not away from zero.
template <class X> static std::vector<float> start(std::vector<float> values) {
    for (float &f : values)
        if (sizeof(X) == 2 && std::bit_cast<uint32_t>(f) % 0x20000 == 0x8000) f = std::nextafter(f, 0.0f);
    return values;
}

struct Parameters : TemporaryDirectory {
    const std::vector<float> embed = with_ties(random_values<float>(7 * C, 1)), score = random_values<float>(C, 2),
                             norm = random_values<float>(C, 3), conv = with_ties(random_values<float>(3 * C, 4)),
                             turned = in_file(conv);

    void save(const std::vector<std::string> &names) const {
        const std::map<std::string, const std::vector<float> *> values = {
            {"embed", &embed}, {"score.weight", &score}, {"norm", &norm}, {"conv", &turned}};
        std::vector<TensorSpec> specs;
        HostMemory memory;
        for (const Tensor &t : table)
            if (std::ranges::count(names, t.name)) specs.push_back({t.name, t.transposed ? Shape{C / 2, 6} : t.shape, "F32"});
        HfWriter writer(dir, specs);
        for (const TensorSpec &spec : specs) writer.write(spec.name, values.at(spec.name)->data(), elements(spec.shape), memory);
        writer.finish();
    }
};

struct Loaded {
    std::vector<float> params, master;  // by global offset
};

// Calls fill(zero, comm, memory) on each rank; all ranks must get the same parameters. `offloaded`: they are in a store.
template <class X, class Fill> static Loaded on_ranks(int ranks, int stage, bool offloaded, Fill fill) {
    Loaded out{{}, std::vector<float>(12 * C)};
    std::mutex mutex;  // of `out`
    run_threads(ranks, {.check = true}, [&](Comm &comm) {
        Zero<Cpu<X>> zero({1}, Sharding(units, stage, ranks, comm.rank, 100, 8, offloaded), table, false, offloaded);
        HostMemory memory;
        Plan plan;
        zero.plan(plan, true);
        zero.gradients.plan_scratch(plan);
        plan.place(true);
        const Arena arena(plan, memory);
        std::unique_ptr<Store> store;
        if (offloaded) store = make_disk_store(testing::TempDir(), plan.store_bytes(), 60), zero.pieces.use(*store, memory);
        fill(zero, comm, memory);
        arena.check_guards();

        const auto gathered = gather_units(zero, comm, units);
        std::lock_guard lock(mutex);
        read_own_floats(zero, out.master);
        const std::vector<float> params = params_of(zero, gathered, units);
        if (out.params.empty()) out.params = params;
        EXPECT_EQ(out.params, params) << "of rank " << comm.rank;
        return 0;
    });
    return out;
}

template <class X> static Loaded initialised(uint64_t seed) {
    return on_ranks<X>(1, 0, false, [&](auto &zero, Comm &comm, Memory &memory) {
        initialise_parameters(zero, comm, seed, 0.5, memory);
        zero.ready(comm, 0, zero.sharding.elements);
    });
}

// Loads the tensors of the file, and the initial values of a new model for the head that the file lacks; then saves all of them.
template <class X> static void expect_loaded_and_saved(const Parameters &t, const char *dtype) {
    const std::string to = t.dir + "/saved";
    fs::create_directories(to);
    const std::vector<float> other = initialised<X>(11).master, score(other.begin() + 7 * C, other.begin() + 8 * C);
    std::vector<float> want = t.embed;
    for (const auto *values : {&score, &t.norm, &t.conv}) want.insert(want.end(), values->begin(), values->end());
    std::vector<float> rounded(want.size());
    for (size_t i = 0; i < want.size(); i++) rounded[i] = float(X(want[i]));
    const auto saved_as = [&](std::vector<float> values) {
        for (float &f : values) f = dtype == std::string("BF16") ? float(bf16(f)) : f;
        return values;
    };
    const auto expect = [&](int ranks, int stage, bool offloaded) {
        SCOPED_TRACE(format("%zu bytes to %s, %d ranks, stage %d, in a store: %d", sizeof(X), dtype, ranks, stage, offloaded));
        const Loaded got = on_ranks<X>(ranks, stage, offloaded, [&](auto &zero, Comm &comm, Memory &memory) {
            const HfWeights weights(t.dir);
            load_parameters(zero, weights, weights, 11, memory);
            std::vector<float> buffer(zero.sharding.largest);
            save_parameters(zero, Mesh(comm, 1), to, dtype, memory, [&](size_t) { return buffer.data(); });
        });
        EXPECT_EQ(got.params, rounded);
        EXPECT_EQ(got.master, start<X>(want));
        const SafetensorsFile saved(to + "/model.safetensors");
        const auto values = [&](const char *name) {
            std::vector<float> out(elements(saved.at(name).shape));
            saved.read(name, out.data());
            return out;
        };
        EXPECT_EQ(saved.at("conv").dtype, dtype);
        EXPECT_EQ(saved.at("conv").shape, Shape({C / 2, 6}));
        EXPECT_EQ(values("embed"), saved_as(start<X>(t.embed)));
        EXPECT_EQ(values("score.weight"), saved_as(score));
        EXPECT_EQ(values("norm"), saved_as(t.norm));
        EXPECT_EQ(values("conv"), saved_as(start<X>(t.turned)));
    };
    for (int ranks : {1, 2, 3})
        for (int stage : {0, 1, 2, 3})
            for (bool offloaded : {false, true}) expect(ranks, stage, offloaded);
}

TEST_F(Parameters, SavedTensorsEqualLoadedOnes) {
    save({"embed", "norm", "conv"});
    expect_loaded_and_saved<float>(*this, "F32");
    expect_loaded_and_saved<float>(*this, "BF16");
    expect_loaded_and_saved<bf16>(*this, "F32");
    expect_loaded_and_saved<bf16>(*this, "BF16");
}

TEST_F(Parameters, MissingHeadIsInitialisedFromTheSeed) {
    const auto head = [&](uint64_t seed) {
        const Loaded got = on_ranks<float>(2, 1, false, [&](auto &zero, Comm &, Memory &memory) {
            const HfWeights weights(dir);
            load_parameters(zero, weights, weights, seed, memory);
        });
        return std::vector<float>(got.master.begin() + 7 * C, got.master.begin() + 8 * C);
    };
    save({"embed", "norm", "conv"});
    EXPECT_NE(head(11), head(12));
    save({"embed", "score.weight", "norm", "conv"});
    EXPECT_EQ(head(11), score);
    save({"embed", "score.weight", "conv"});
    expect_error([&] { head(11); }, {"has no tensor \"norm\""});
}

// A deviation estimated from n values is off by 1 / sqrt(2 n) of itself; five times that is allowed. Two layers have four projections into the
// residual stream.
TEST_F(Parameters, DeviationsOfInitialValues) {
    const size_t n = 4096, layers = 2;
    for (const auto &[init, want] :
         {std::pair(Tensor::normal, 0.5), {Tensor::residual, 0.5 / std::sqrt(2 * layers)}, {Tensor::score, 1 / double(n + 1)}}) {
        std::vector<Tensor> tensors;
        for (size_t i = 0; i < 2 * layers; i++) tensors.push_back({format("%zu", i), {1, n}, init, true, i * n, n});
        Zero<CpuF32> zero({1}, Sharding({{0, 2 * layers * n}}, 0, 1, 0, 100), tensors);
        SelfComm comm;
        HostMemory memory;
        Plan plan;
        zero.plan(plan, true);
        plan.place(true);
        const Arena arena(plan, memory);
        initialise_parameters(zero, comm, 1, 0.5, memory);
        double squares = 0;
        for (size_t i = 0; i < n; i++) squares += std::pow(double(zero.params[i]), 2);
        EXPECT_NEAR(std::sqrt(squares / double(n)) / want, 1, 5 / std::sqrt(2.0 * double(n))) << int(init);
    }
}
