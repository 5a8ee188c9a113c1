// What comes into the parameters where a language model becomes a reward model.
#include "../llmc/train/parameters.h"

#include <unistd.h>

#include <bit>
#include <filesystem>

#include "check.h"

namespace fs = std::filesystem;

static constexpr size_t C = 50;

// A bucket of rows and a small one; a head that is not the last tensor. By global offsets.
static const std::vector<Tensor> table = {{"embed", {7, C}, Tensor::normal, true, 0, 7 * C},
                                          {"score.weight", {1, C}, Tensor::score, true, 7 * C, C},
                                          {"norm", {C}, Tensor::ones, false, 8 * C, C}};
static const std::vector<Cut> cuts = {{0, 7 * C, C}, {7 * C, 9 * C, 0}};

// Every third lies halfway between two bf16.
static std::vector<float> with_ties(std::vector<float> values) {
    for (size_t i = 0; i < values.size(); i += 3) values[i] = 1 + float(i % 128 * 2 + 1) / 256;
    return values;
}

// What training in X begins with: the floats of the file. But ties go to even, as elsewhere, and not away from zero.
template <class X> static std::vector<float> start(std::vector<float> values) {
    for (float &f : values)
        if (sizeof(X) == 2 && std::bit_cast<uint32_t>(f) % 0x20000 == 0x8000) f = std::nextafter(f, 0.0f);
    return values;
}

struct Parameters : testing::Test {
    const std::string dir = testing::TempDir() + "llmc_parameters_" + std::to_string(getpid());
    const std::vector<float> embed = with_ties(random_values<float>(7 * C, 1)), score = random_values<float>(C, 2),
                             norm = random_values<float>(C, 3);

    void SetUp() override { fs::create_directories(dir); }
    void TearDown() override { fs::remove_all(dir); }

    void save(const std::vector<std::string> &names) const {
        const std::map<std::string, const std::vector<float> *> values = {
            {"embed", &embed}, {"score.weight", &score}, {"norm", &norm}};
        std::vector<TensorSpec> specs;
        HostMemory memory;
        for (const Tensor &t : table)
            if (std::ranges::count(names, t.name)) specs.push_back({t.name, t.shape, "F32"});
        HfWriter writer(dir, specs);
        for (const TensorSpec &spec : specs) writer.write(spec.name, values.at(spec.name)->data(), elements(spec.shape), memory);
        writer.finish();
    }
};

struct Loaded {
    std::vector<float> params, master;  // by global offsets
};

// fill(zero, comm, memory) on every rank; they must agree.
template <class X, class Fill> static Loaded on_ranks(int ranks, int stage, Fill fill) {
    Loaded out{{}, std::vector<float>(9 * C)};
    std::mutex mutex;  // of `out`
    run_threads(ranks, {.check = true}, [&](Comm &comm) {
        Zero<Cpu<X>> zero({1}, Sharding(cuts, stage, ranks, comm.rank, 100), table);
        HostMemory memory;
        Plan plan;
        zero.plan(plan, true);
        plan.place(true);
        const Arena arena(plan, memory);
        fill(zero, comm, memory);
        arena.check_guards();

        std::lock_guard lock(mutex);
        for (const Span &s : zero.sharding.spans())
            for (size_t i = 0; i < s.count; i++) out.master[s.global + i] = zero.params_at(s).load(i);
        std::vector<float> params;
        for (const Bucket &b : zero.sharding.buckets)
            for (size_t i = 0; i < b.count; i++) params.push_back(float(zero.params[b.begin + i]));
        if (out.params.empty()) out.params = params;
        EXPECT_EQ(out.params, params) << "of rank " << comm.rank;
        return 0;
    });
    return out;
}

template <class X> static Loaded loaded(const std::string &dir, int ranks, int stage, uint64_t seed) {
    return on_ranks<X>(ranks, stage,
                       [&](auto &zero, Comm &, Memory &memory) { load_parameters(zero, HfWeights(dir), seed, memory); });
}

template <class X> static Loaded initialised(uint64_t seed) {
    return on_ranks<X>(1, 0, [&](auto &zero, Comm &comm, Memory &memory) {
        initialise_parameters(zero, comm, seed, 0.5, memory);
        zero.ready(comm, 0, zero.sharding.elements);
    });
}

// The file's tensors and, for the head, what a model begins with that has no file; for any number of ranks.
template <class X> static void expect_head_from_seed(const Parameters &t) {
    const std::vector<float> want_score = initialised<X>(11).master;
    std::vector<float> want = t.embed;
    want.insert(want.end(), want_score.begin() + 7 * C, want_score.begin() + 8 * C);
    want.insert(want.end(), t.norm.begin(), t.norm.end());
    std::vector<float> rounded(want.size());
    for (size_t i = 0; i < want.size(); i++) rounded[i] = float(X(want[i]));
    for (int ranks : {1, 2, 3})
        for (int stage : {0, 1, 2}) {
            SCOPED_TRACE(format("%d ranks, stage %d", ranks, stage));
            const Loaded got = loaded<X>(t.dir, ranks, stage, 11);
            EXPECT_EQ(got.params, rounded);
            EXPECT_EQ(got.master, start<X>(want));
        }
    EXPECT_NE(loaded<X>(t.dir, 1, 0, 12).master, want) << "of another seed";
}

TEST_F(Parameters, AHeadThatTheFileLacksComesFromTheSeed) {
    save({"embed", "norm"});
    expect_head_from_seed<float>(*this);
    expect_head_from_seed<bf16>(*this);
}

TEST_F(Parameters, AHeadThatTheFileHasIsRead) {
    save({"embed", "score.weight", "norm"});
    const Loaded got = loaded<bf16>(dir, 2, 1, 11);
    EXPECT_EQ(std::vector<float>(got.master.begin() + 7 * C, got.master.begin() + 8 * C), score);
}

TEST_F(Parameters, FloatsOfABf16ModelGoOutAsTheyCameIn) {
    save({"embed", "score.weight", "norm"});
    const std::string to = dir + "/saved";
    fs::create_directories(to);
    for (int ranks : {1, 2, 3})
        for (int stage : {0, 1, 2}) {
            SCOPED_TRACE(format("%d ranks, stage %d", ranks, stage));
            on_ranks<bf16>(ranks, stage, [&](auto &zero, Comm &comm, Memory &memory) {
                load_parameters(zero, HfWeights(dir), 11, memory);
                std::vector<float> buffer(zero.sharding.largest);
                save_parameters(zero, comm, to, "F32", memory, [&](size_t) { return buffer.data(); });
            });
            const SafetensorsFile saved(to + "/model.safetensors");
            EXPECT_EQ(saved.array<float>("embed"), start<bf16>(embed));
            EXPECT_EQ(saved.array<float>("score.weight"), score);
            EXPECT_EQ(saved.array<float>("norm"), norm);
        }
}

TEST_F(Parameters, AnyOtherTensorMustBeThere) {
    save({"embed", "score.weight"});
    try {
        loaded<float>(dir, 1, 0, 11);
        ADD_FAILURE() << "no error";
    } catch (const Error &error) {
        EXPECT_NE(std::string(error.what()).find("has no tensor \"norm\""), std::string::npos) << error.what();
    }
}

// The estimate from n values is off by 1 / sqrt(2 n) of itself: five times that.
TEST_F(Parameters, DeviationOfAHead) {
    const size_t n = 4096;
    double squares = 0;
    for (float x : initial_values({"score.weight", {1, n}, Tensor::score, true, 0, n}, 0, n, 1, 0.5))
        squares += double(x) * double(x);
    EXPECT_NEAR(std::sqrt(squares / double(n)) * double(n + 1), 1, 5 / std::sqrt(2.0 * double(n)));
}
