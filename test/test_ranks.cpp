// Splits of a step over ranks that are threads (rank_cases.h), and the bytes that ranks send and hold.
#include <map>

#include "../llmc/model/prediction.h"
#include "../llmc/train/generation.h"
#include "../llmc/train/open_model.h"
#include "errors.h"
#include "late_comm.h"
#include "models.h"
#include "rank_cases.h"

namespace {

template <class Dev>
RankResult on_threads(
    const RankCase &c, RankModel model, bool late = false,
    const std::function<void(ModelLimits &)> &change = [](ModelLimits &) {}) {
    RankResult result = empty_result(model, c.task);
    run_threads(int(c.world), {.check = true, .timeout = 60}, [&](Comm &threads) {
        const ContextPtr ctx = make_context();
        LateComm late_comm(threads);
        rank_step(Dev{1, ctx.get()}, late ? static_cast<Comm &>(late_comm) : threads, c, model, result, change);
        return 0;
    });
    return result;
}

// Draws the options of case `number`, one after the other.
class Picks {
    Random random_;
    uint64_t drawn_ = 0;

  public:
    Picks(uint64_t seed, uint32_t number) : random_{seed, Purpose::test, number} {}
    template <class T, class... Ts> T operator()(T first, Ts... others) {
        const std::vector<T> all = {first, others...};
        return all[random_.block(drawn_++)[0] % all.size()];
    }
};

}  // namespace

struct Matrix : testing::TestWithParam<size_t> {};
struct SlowMatrix : Matrix {};

using ModelAndLoss = std::pair<RankModel, Task>;
static const std::vector<ModelAndLoss> language_models = {{untied, SFT}, {tied, SFT}, {gpt2, SFT}};

// The models alternate, so each runs at every stage with every number of micro-steps.
static void expect_one_ranks_results(const std::vector<RankCase> &cases, const std::vector<ModelAndLoss> &models) {
    std::map<ModelAndLoss, RankResult> want;
    for (const auto &[model, task] : models) want[{model, task}] = one_rank(make_device<CpuF32>(2), model, task);
    size_t number = 0;
    for (RankCase c : cases) {
        const ModelAndLoss &of = models[(number + number / models.size()) % models.size()];
        c.task = of.second, number++;
        check_rank_result(c.name(), on_threads<CpuF32>(c, of.first), want[of]);
    }
}

TEST_P(Matrix, EqualsOneRank) {
    const auto cases = rank_cases(GetParam());
    expect_one_ranks_results(GetParam() > 2 ? third_of(cases) : cases, language_models);
}
TEST_P(SlowMatrix, EqualsOneRank) { expect_one_ranks_results(rank_cases(GetParam()), language_models); }
TEST_P(Matrix, GroupsEqualOneRank) { expect_one_ranks_results(group_cases(GetParam()), language_models); }

INSTANTIATE_TEST_SUITE_P(Worlds, Matrix, testing::Values(1, 2, 3, 4, 6, 8), testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Worlds, SlowMatrix, testing::Values(3, 4, 6, 8), testing::PrintToStringParamName());

// With the losses of dpo and rm all ranks of a ring start the backward pass from the values of its whole row. Dropout does not depend on ranks
// and rows.
TEST(Ranks, LossesOfDocumentsAdaptersAndOtherModelsEqualOneRank) {
    for (const std::vector<ModelAndLoss> &models : {std::vector<ModelAndLoss>{{tied, DPO}, {untied, RM}, {adapted, RM}},
                                                    {{adapted, SFT}, {norm_after, SFT}, {experts, SFT}}})
        expect_one_ranks_results(third_of(rank_cases(4)), models);
}

// A loss of tokens that the head calls between its softmax and its gradients, and one that begins with a pass of its own.
TEST(Ranks, LossesOfTokensNeedOnePassOfTheHead) {
    for (RankModel model : {untied, tied, gpt2, adapted, experts}) {
        const RankResult one = one_rank(make_device<CpuF32>(2), model, GRPO), two = one_rank(make_device<CpuF32>(2), model, DPO);
        EXPECT_EQ(one.loss, two.loss) << model;
        EXPECT_EQ(one.gradient, two.gradient) << model;
    }
    expect_one_ranks_results(third_of(rank_cases(4)), {{tied, GRPO}, {untied, GRPO}, {adapted, GRPO}});
}

// The states of linear attention pass from piece to piece in every mode.
TEST(Ranks, LinearAttentionEqualsOneRank) {
    for (const size_t world : {2, 3, 4}) expect_one_ranks_results(third_of(rank_cases(world)), {{hybrid, SFT}});
    expect_one_ranks_results({{4, 4, SpMode::ring, 6, 1, 1, 24, DPO}, {4, 2, SpMode::ulysses, 6, 3, 3, 24, RM}},
                             {{hybrid, DPO}, {hybrid, RM}});
    expect_one_ranks_results(third_of(expert_cases()), {{sparse_hybrid, SFT}});
    // The sixth document begins with the last two tokens of the first rank's 64, and ends after the second rank's.
    check_rank_result("a document over three ranks", on_threads<CpuF32>({4, 4, SpMode::ring, 6, 1, 1, 8}, hybrid),
                      on_threads<CpuF32>({1, 1, SpMode::ring, 6, 0, 1, 8}, hybrid));
}

TEST(Ranks, DividedExpertsEqualOneRank) { expect_one_ranks_results(third_of(expert_cases()), {{experts, SFT}}); }
TEST(SlowRanks, DividedExpertsEqualOneRank) { expect_one_ranks_results(expert_cases(), {{experts, SFT}}); }

// A rank has 1 to 3 of the 6 key heads with their query heads, or half of one's; 3 to 20 of 40 channels; and a part of 97 tokens.
TEST(Ranks, DividedTensorsEqualOneRank) {
    expect_one_ranks_results(tensor_cases(), {{untied, SFT}, {tied, SFT}});
    expect_one_ranks_results(third_of(tensor_cases()), {{untied, RM}, {tied, DPO}, {untied, GRPO}, {tied, GRPO}});
}
TEST(Ranks, DividedTensorsWithAdaptersEqualOneRank) {
    expect_one_ranks_results(third_of(tensor_cases()), {{adapted, SFT}});
    expect_one_ranks_results(third_of(tensor_cases()), {{adapted, RM}, {adapted, GRPO}});
}
// Of at most so many key heads, in models whose ranks need one each.
static std::vector<RankCase> cases_of_own_keys(size_t heads = 6) {
    auto cases = tensor_cases();
    std::erase_if(cases, [&](const RankCase &c) { return c.tp > heads; });
    return cases;
}
TEST(Ranks, DividedLinearAttentionEqualsOneRank) {
    expect_one_ranks_results(cases_of_own_keys(2), {{hybrid, SFT}});
    expect_one_ranks_results(third_of(cases_of_own_keys(2)), {{hybrid, RM}, {hybrid, GRPO}});
}
TEST(Ranks, DividedTensorsOfOtherLayersEqualOneRank) {
    expect_one_ranks_results(cases_of_own_keys(), {{norm_after, SFT}, {gpt2, SFT}, {fused, SFT}, {adapted_fused, SFT}});
}
// Each rank has whole experts for its own tokens: all of them, or those that the ranks of its tensor group leave to it, or those of other ranks.
static std::vector<RankCase> cases_of_experts(std::vector<RankCase> cases) {
    for (size_t i = 0; i < cases.size(); i++)
        cases[i].experts = std::array{size_t(1), cases[i].tp, cases[i].world / cases[i].tp}[i % 3];
    return cases;
}
TEST(Ranks, DividedTensorsBesideExpertsEqualOneRank) {
    expect_one_ranks_results(cases_of_experts(tensor_cases()), {{experts, SFT}});
    expect_one_ranks_results(cases_of_experts(third_of(tensor_cases())), {{experts, DPO}, {experts, GRPO}});
}
TEST(SlowRanks, DividedTensorsEqualOneRank) {
    expect_one_ranks_results(tensor_cases(), {{untied, SFT}, {tied, SFT}, {untied, RM}, {tied, GRPO}});
    for (const ModelAndLoss &of : {ModelAndLoss{adapted, SFT}, {adapted, RM}, {adapted, GRPO}})
        expect_one_ranks_results(tensor_cases(), {of});
    for (RankModel model : {norm_after, gpt2, fused, adapted_fused})
        expect_one_ranks_results(cases_of_own_keys(), {{model, SFT}});
}

TEST(Ranks, Bf16LossIsNear) {
    const double want = one_rank(make_device<CpuBf16>(2), tied).loss;
    for (const RankCase &c : third_of(rank_cases(4)))
        EXPECT_NEAR(on_threads<CpuBf16>(c, tied).loss, want, 2e-3 * want) << c.name();
    for (const RankCase &c : third_of(tensor_cases()))
        EXPECT_NEAR(on_threads<CpuBf16>(c, tied).loss, want, 2e-3 * want) << c.name();
}

// In FP8 each part of a matrix has a scale of its own. Scales are powers of two, so most numbers are rounded as in the whole matrix.
TEST(Ranks, DividedTensorsInFp8AreRoundedAsOneRanks) {
    const auto result = [](const RankCase &c, bool fp8) {
        return on_threads<CpuF32>(c, wide, false, [&](ModelLimits &limits) { limits.fp8 = fp8; });
    };
    const RankCase one{1, 1, SpMode::ring, 6, 0, 1};
    const RankResult want = result(one, true);
    const auto distance = [&](const RankResult &got) {
        double error = 0, squares = 0;
        for (size_t i = 0; i < want.gradient.size(); i++)
            error += std::pow(double(got.gradient[i]) - want.gradient[i], 2), squares += std::pow(double(want.gradient[i]), 2);
        return std::sqrt(error / squares);
    };
    const RankResult exact = result(one, false);
    for (const size_t tp : {2, 3, 6}) {
        RankCase c = one;
        c.world = c.tp = tp;
        EXPECT_LE(distance(result(c, true)), 0.1 * distance(exact)) << tp;
    }
}

// Stage 3, offloading in pieces of any size, recomputation, late messages and the search for anomalies change no bit: the same numbers are
// summed in the same order. Dead arrays contain NaN, so a read before or after an array's lifetime fails.
TEST(Ranks, StageOffloadingAndLateMessagesChangeNoBit) {
    for (uint32_t number = 0; number < 56; number++) {
        Picks pick(4, number);
        const uint32_t what = number % 8;
        RankCase c{};
        c.sp = pick(1u, 1u, 2u, 3u), c.tp = pick(1u, 1u, 2u, c.sp < 3 ? 3u : 1u);
        c.world = c.sp * c.tp * pick(1u, 2u, c.sp * c.tp < 3 ? 3u : 1u), c.micro_steps = pick(1u, 2u, 3u);
        c.stage = what ? pick(0, 1, 2, 3) : 3;
        c.mode = pick(SpMode::ring, SpMode::gather, SpMode::ulysses), c.head_stride = c.tp == 1 ? pick(1u, 2u, 6u) : 1;
        c.task = pick(SFT, SFT, DPO, RM);
        if (pick(0, 1) && c.stage > 0 && c.world > 2 * c.tp && c.world % (2 * c.tp) == 0) c.group = 2 * c.tp;
        const RankModel model =
            c.task == RM ? untied : pick(untied, tied, gpt2, adapted, norm_after, experts, c.tp < 3 ? hybrid : fused);
        ModelLimits drawn;
        drawn.recompute = pick(Recompute::none, Recompute::cheap, Recompute::layer);
        drawn.ranks.bucket_bytes = pick(4096u, 1u << 30);
        drawn.bf16_gradients = pick(0, 1), drawn.muon = what < 2 && pick(0, 1);
        drawn.moments = pick(Moments::f32, Moments::bf16, drawn.muon ? Moments::f32 : Moments::blockwise);
        const Offload offload{.activations = (what & 1) > 0,
                              .optimizer = (what & 2) > 0,
                              .weights = (what & 4) > 0,
                              .dir = testing::TempDir(),
                              .piece = pick(1u, 10000u, 1u << 30)};
        const bool half = pick(0, 1), looks = pick(0, 1);
        const bool late = pick(0, 1) && c.micro_steps > 1;  // after an update each rank has a row, and waits for gathered weights
        const auto run = [&](int stage, bool changed) {
            RankCase own = c;
            own.stage = stage, own.looks = changed && looks;
            const auto change = [&](ModelLimits &limits) {
                limits.ranks.bucket_bytes = drawn.ranks.bucket_bytes, limits.moments = drawn.moments;
                limits.bf16_gradients = drawn.bf16_gradients, limits.muon = drawn.muon;
                if (changed) limits.offload = offload, limits.recompute = drawn.recompute;
            };
            return half ? on_threads<CpuBf16>(own, model, changed && late, change)
                        : on_threads<CpuF32>(own, model, changed && late, change);
        };
        SCOPED_TRACE(format("case %u, %s, model %d", number, c.name().c_str(), int(model)));
        const RankResult got = run(c.stage, true), want = run(std::min(c.stage, 2), false);
        EXPECT_EQ(got.loss, want.loss);
        EXPECT_EQ(got.norm, want.norm);
        EXPECT_EQ(got.gradient, want.gradient);
        EXPECT_EQ(got.moments, want.moments);
        EXPECT_EQ(got.next_loss, want.next_loss);  // of the updated parameters
        EXPECT_GT(want.norm, 0);
    }
}

// Gradients stored in bf16 are close to those in float. In a step of one micro-step each is rounded once, by less than 2^-7 of itself; that of a
// tied embedding is also rounded as the head's, which may be larger than the sum. In several micro-steps at stages 0 and 1 each rank stores its
// own sum in bf16.
TEST(Ranks, Bf16GradientsAreNear) {
    struct Split {
        size_t world, micro_steps;
        int stage;
    };
    for (RankModel model : {untied, tied, gpt2, adapted}) {
        const RankResult want = one_rank(make_device<CpuF32>(2), model);
        for (const auto &[world, micro_steps, stage] :
             {Split{1, 1, 0}, {2, 1, 0}, {2, 1, 1}, {3, 1, 2}, {3, 1, 3}, {2, 3, 0}, {2, 3, 1}, {2, 3, 2}}) {
            const RankCase c{world, 1, SpMode::ring, 6, stage, micro_steps};
            const RankResult got = on_threads<CpuF32>(c, model, false, [](ModelLimits &limits) { limits.bf16_gradients = true; });
            SCOPED_TRACE(c.name());
            EXPECT_NEAR(got.loss, want.loss, 1e-6 * want.loss);
            EXPECT_LT(got.next_loss, want.loss);
            const bool once = micro_steps == 1 && (model == untied || model == adapted);
            double error = 0, squares = 0, norm = 0;
            for (size_t i = 0; i < want.gradient.size(); i++) {
                ASSERT_EQ(got.gradient[i], float(bf16(got.gradient[i]))) << i;
                const double g = want.gradient[i], off = std::abs(got.gradient[i] - g),
                             noise = 1e-5 * want.norm;  // of the float sums
                ASSERT_TRUE(!once || off <= 0x1p-7 * std::abs(g) + noise) << i;
                error += off * off, squares += g * g, norm += double(got.gradient[i]) * got.gradient[i];
            }
            // At most 12 roundings, each with a deviation of at most 2^-8 of a part of the sum.
            EXPECT_LE(std::sqrt(error), std::sqrt(12) * 0x1p-8 * std::sqrt(squares));
            EXPECT_GT(error, 0);
            EXPECT_NEAR(got.norm, std::sqrt(norm), 1e-12 * got.norm);
        }
    }
}

// The iteration amplifies the rounding of sums in another order for small singular values.
TEST(Ranks, MuonIsNearOneRank) {
    const auto muon = [](ModelLimits &limits) { limits.muon = true; };
    for (RankModel model : {untied, tied, gpt2, adapted, fused, experts}) {
        const RankResult want = on_threads<CpuF32>({1, 1, SpMode::ring, 6, 0, 1}, model, false, muon),
                         adamw = one_rank(make_device<CpuF32>(2), model);
        EXPECT_NE(want.next_loss, adamw.next_loss);
        std::vector<RankCase> cases = {{3, 1, SpMode::ring, 6, 2, 3}, {4, 2, SpMode::gather, 2, 1, 2}};
        for (const auto &[world, tp, stage] : {std::tuple(2, 2, 0), {4, 4, 1}, {6, 3, 3}}) {
            cases.push_back({size_t(world), 1, SpMode::ring, 1, stage, 1});
            cases.back().tp = size_t(tp);
        }
        for (const RankCase &c : cases) check_rank_result(c.name(), on_threads<CpuF32>(c, model, false, muon), want);
    }
}

// With offloading the memory holds the activations and weights of two layers at a time, one of which is being copied, and the moments in pieces.
TEST(Ranks, PlanOfOffloading) {
    ModelConfig model = rank_model(untied);
    model.L = 12, model.window.assign(12, 0);
    const auto plan = [&](const Offload &offload) {
        ModelLimits limits;
        limits.row_tokens = limits.positions = 4096, limits.recompute = Recompute::layer, limits.offload = offload;
        auto planned = make_model(make_device<CpuF32>(1), model, limits);
        planned->plan().place();
        return std::pair(planned->plan().bytes(), planned->plan().store_bytes());
    };
    const size_t T = 4096, C = model.C, Q = model.H * model.D, qk = (model.H + model.KV) * 4, page = store_alignment;
    const size_t kept = T * ((C + Q) * 4 + model.H * 4 + 8 + qk);  // bytes of a layer
    const auto [all, none] = plan({});
    EXPECT_EQ(none, 0);
    const auto [bytes, stored] = plan({.activations = true});
    EXPECT_EQ(stored, (model.L - 1) * kept);
    EXPECT_LE(bytes,
              all - (model.L - 3) * kept + 40 * page);  // of three layers: the last one, and one of two others is being copied
    const auto [of_layers, weights] = plan({.weights = true, .piece = 4096});
    const size_t layer = (parameter_count(model) - 2 * model.V * model.C - model.C) / model.L * sizeof(float);
    EXPECT_GE(weights, 4 * parameter_count(model));
    EXPECT_LE(of_layers, all - (model.L - 2) * layer + 3 * 4096 * sizeof(float) + 40 * page);  // two layers, and windows
    const auto [in_pieces, moments] = plan({.optimizer = true, .piece = 4096});
    const size_t shard = size_t(parameter_count(model)), windows = 6 * 4096 * sizeof(float);
    EXPECT_GE(moments, 8 * shard);
    EXPECT_LE(in_pieces, all - 8 * shard + windows + 40 * page);
}

// ---- bytes sent ------------------------------------------------------------------------------------------------------------------------

namespace {

// A step whose rows have one document of 64 tokens for each rank of a ring. Every layer sees whole documents, and ulysses divides the KV heads
// evenly.
struct Sending {
    RankCase c;
    Layout layout;  // expected from the rates of limits()
    RankModel of;
    Recompute recompute;
    size_t document = 0, window = 0;  // not 0: documents of this length, and a window in the second layer
    bool offloaded = false;           // weights
    bool muon = false;
    bool frozen = false;  // with adapters of the queries
    size_t longer = 1;    // above 1: so many times the tokens, and every layer of a hybrid has linear attention

    size_t S() const { return longer * row_multiple * c.sp; }
    ModelConfig model() const {
        ModelConfig m = rank_model(of);
        m.KV = 12, m.window = {0, window, 0}, m.max_positions = S();
        if (c.tp > 1) m.V = 96;                                  // parts of equal size
        if (of == experts) m.experts.chosen = m.experts.number;  // equal loads: every token goes to every expert
        if (of == hybrid && longer > 1) m.delta.layers = {true, true, true};
        if (frozen) m.lora = {.rank = 3, .alpha = 3, .targets = {"q_proj"}};
        return m;
    }
    Row row() const {
        std::vector<std::vector<int32_t>> documents;
        in_parts(
            S(), [&](size_t, size_t n) { documents.emplace_back(n, 5); }, document ? document : S());
        return make_row(documents);
    }
    ModelLimits limits() const {
        ModelLimits limits;
        limits.row_tokens = S(), limits.positions = document ? document : S(), limits.recompute = recompute;
        limits.muon = muon;
        Ranks &r = limits.ranks;
        r.world = c.world, r.sp = c.sp, r.sp_mode = c.mode, r.head_stride = c.head_stride, r.zero_stage = c.stage;
        r.zero_group = c.group, r.expert_parallel = c.experts, r.tp = c.tp;
        limits.offload = {.weights = offloaded, .dir = testing::TempDir()};
        r.flops = layout == Layout::zigzag ? 1 : 1e30, r.bandwidth = layout == Layout::zigzag ? 1e30 : 1;
        return limits;
    }
    std::string name() const {
        return c.name() + ", " + name_of(layout) + (of == tied ? ", tied" : "") + (offloaded ? ", offloaded" : "");
    }
};

// Expects the predicted number of bytes, and returns it.
template <class Dev> Payload expect_predicted(const Sending &s) {
    SCOPED_TRACE(s.name());
    const RankCase &c = s.c;
    const ModelConfig config = s.model();
    const ModelLimits limits = s.limits();
    const Row row = s.row();
    EXPECT_TRUE(s.document || split_row(config, limits.ranks, sizeof(typename Dev::X), row).layout == s.layout);
    std::vector<Payload> of_ranks(c.world);
    run_threads(int(c.world), {.check = true}, [&](Comm &comm) {
        const ContextPtr ctx = make_context();
        Mesh mesh(comm, int(c.sp), int(c.group), int(c.experts), int(c.tp));
        ModelLimits own = limits;
        own.ranks.rank = size_t(comm.rank);
        const auto model = make_model(Dev{1, ctx.get()}, config, own);
        model->allocate(mesh, false, false);
        model->initialise(1);
        model->take_sent();
        model->zero_gradients();
        for (size_t i = 0; i < c.micro_steps; i++) model->accumulate(row, 1e-3f, i + 1 == c.micro_steps);
        model->gradient_norm();
        model->update({1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 1});
        of_ranks[size_t(comm.rank)] = model->take_sent();
        return 0;
    });
    Payload sent;
    for (const Payload &p : of_ranks) sent += p;
    const auto model = make_model(make_device<Dev>(1), config, limits);
    const Payload predicted = predict_messages(*model, config, limits, c.micro_steps);
    for (const auto member : {&Payload::kv, &Payload::dkv, &Payload::grads, &Payload::params, &Payload::experts})
        EXPECT_EQ(sent.*member, predicted.*member);
    const double tokens = double(predicted.tensor);
    EXPECT_NEAR(double(sent.tensor), tokens, 0.02 * tokens);  // without the statistics of targets, which the row lacks
    return sent;
}

}  // namespace

// The prediction follows the table in ring.h, which test_ring.cpp compares with the bytes of a single ring.
TEST(Ranks, AttentionSendsWhatIsPredicted) {
    for (size_t world : {2, 3, 4})
        for (Layout layout : {Layout::contiguous, Layout::zigzag})
            for (SpMode mode : {SpMode::ring, SpMode::gather, SpMode::ulysses}) {
                if (mode == SpMode::ulysses && layout != Layout::contiguous) continue;
                for (Recompute recompute : {Recompute::none, Recompute::layer})
                    expect_predicted<CpuF32>({{world, world, mode, 3, 1, 1}, layout, untied, recompute});
                expect_predicted<CpuBf16>({{world, world, mode, 12, 2, 2}, layout, tied, Recompute::cheap});
            }
    expect_predicted<CpuF32>({{4, 2, SpMode::ring, 12, 1, 2}, Layout::zigzag, untied, Recompute::none});  // two rings
    for (SpMode mode : {SpMode::ring, SpMode::gather, SpMode::ulysses})
        for (size_t document : {200, 70, 11})  // several documents and a window need fewer hops
            EXPECT_GT(
                expect_predicted<CpuBf16>({{4, 4, mode, 4, 2, 1}, Layout::contiguous, tied, Recompute::none, document, 9}).kv, 0);
}

// The bytes of states do not depend on the length of the row; documents that end with the ranks' pieces send nothing.
TEST(Ranks, LinearAttentionSendsWhatIsPredicted) {
    for (const size_t P : {2, 3, 4})
        for (SpMode mode : {SpMode::ring, SpMode::gather, SpMode::ulysses}) {
            expect_predicted<CpuF32>({{P, P, mode, 3, 1, 1}, Layout::contiguous, hybrid, Recompute::layer});
            for (const size_t longer : {2, 3}) {
                Sending s{{P, P, mode, 12, 2, 2}, Layout::contiguous, hybrid, Recompute::none};
                s.longer = longer;
                const DeltaConfig d = s.model().delta;
                const Payload sent = expect_predicted<CpuBf16>(s);
                EXPECT_EQ(sent.kv, 2 * 3 * (P - 1) * (d.Hv * d.Dk * d.Dv * 4 + 3 * d.row() * 2));  // of 2 rows and 3 layers
                EXPECT_EQ(sent.dkv, sent.kv);
                s.document = s.S() / P;
                EXPECT_EQ(expect_predicted<CpuBf16>(s).kv, 0);
            }
        }
    expect_predicted<CpuF32>({{4, 4, SpMode::ring, 3, 1, 1}, Layout::zigzag, hybrid, Recompute::cheap});
}

TEST(Ranks, DividedTensorsSendWhatIsPredicted) {
    for (const auto &[sp, dp, tp] : std::vector<std::array<size_t, 3>>{{1, 1, 2}, {1, 2, 2}, {2, 1, 2}, {1, 1, 4}})
        for (int stage : {0, 2, 3}) {
            Sending s{{sp * dp * tp, sp, SpMode::ring, 12, stage, 2},
                      Layout::contiguous,
                      stage ? untied : tied,
                      recompute_levels[stage % 3]};
            s.c.tp = tp;
            EXPECT_GT(expect_predicted<CpuF32>(s).tensor, 0u);
        }
}

TEST(Ranks, ZeroSendsWhatIsPredicted) {
    for (size_t world : {2, 3})
        for (int stage : {0, 1, 2, 3})
            for (RankModel model : {untied, tied}) {
                Sending s{{world, 1, SpMode::ring, 12, stage, 1 + size_t(model)}, Layout::contiguous, model, Recompute::none};
                s.muon = (stage + int(model)) % 2;
                expect_predicted<CpuF32>(s);
                expect_predicted<CpuBf16>(s);
                s.offloaded = true, s.muon = false;
                expect_predicted<CpuBf16>(s);
            }
}

TEST(Ranks, GroupsSendWhatIsPredicted) {
    for (const RankCase &c : group_cases(6))
        for (RankModel model : {untied, tied}) {
            Sending s{c, Layout::contiguous, model, Recompute::none, 70};
            s.muon = model == tied;
            expect_predicted<CpuBf16>(s);
        }
}

// In a layer the forward pass gathers the tokens of two blocks and divides their sums; so does the backward pass, which gathers both inputs again, and
// recomputation one of them and one sum. Embedding and head each do it once in both passes; and the head gathers five statistics of each target. Of a
// layer with experts only attention is such a block.
TEST(Ranks, DividedTensorsSendWhatTheFormulaSays) {
    for (const auto &[of, tp, recompute] : {std::tuple(untied, size_t(2), Recompute::none),
                                            {untied, 4, Recompute::layer},
                                            {untied, 2, Recompute::cheap},
                                            {hybrid, 2, Recompute::none},
                                            {hybrid, 2, Recompute::layer},
                                            {experts, 2, Recompute::none},
                                            {experts, 2, Recompute::layer}}) {
        const RankCase c{tp, 1, SpMode::ring, 6, 1, 1};
        RankCase of_tensors = c;
        of_tensors.tp = tp, of_tensors.documents = 8;
        const RankResult got = on_threads<CpuF32>(of_tensors, of, false, [&](ModelLimits &l) { l.recompute = recompute; });
        const Row row = pad_row(rank_rows(1, 8)[0], 1);
        const ModelConfig m = rank_model(of);
        const size_t gathered = (tp - 1) * row.T * m.C * sizeof(float), of_layer = recompute == Recompute::layer ? 12 : 10,
                     of_mixture = recompute == Recompute::layer ? 7 : 5, mixtures = of == experts ? 2 : 0,
                     layers = (m.L - mixtures) * of_layer + mixtures * of_mixture;
        EXPECT_EQ(got.sent.tensor, gathered * (layers + 4) + (tp - 1) * tp * 5 * row.targets.size() * sizeof(float)) << tp;
    }
}

// Passes a generator's calls on, and counts the tokens of its passes, each padded so that the ranks have equal numbers.
struct CountedPasses final : Generator {
    Generator &of;
    size_t ranks, tokens = 0;

    CountedPasses(Generator &generator, size_t ranks) : of(generator), ranks(ranks) {}
    void next_logits(const Row &row, const CacheStep &step) override {
        tokens += round_up(row.T, ranks);
        of.next_logits(row, step);
    }
    std::vector<float> logits() override { return of.logits(); }
    DrawnTokens draw(const DrawRequest &request) override { return of.draw(request); }
    void copy_cache_page(size_t to, size_t from) override { of.copy_cache_page(to, from); }
    void copy_state(size_t to, size_t from) override { of.copy_state(to, from); }
    bool stops(bool wants) override { return of.stops(wants); }
    void finish() override { of.finish(); }
};

TEST(Ranks, GenerationOnDividedTensorsSendsWhatTheFormulaSays) {
    ModelConfig m = rank_model(untied);
    m.V = 96;
    std::vector<Prompt> prompts;
    for (uint32_t i = 0; i < 5; i++) prompts.push_back({std::vector<int32_t>(3 + 20 * i, int32_t(i)), i});
    const GenerationSettings settings{
        .max_new_tokens = 6, .sampling = {.temperature = 1}, .seed = 1, .vocabulary = m.V, .eos = {}};
    const GenerationLimits room(prompts, settings, prompts.size());
    for (const size_t tp : {size_t(2), size_t(4)})
        run_threads(int(tp), {.check = true, .timeout = 60}, [&](Comm &comm) {
            const ContextPtr ctx = make_context();
            ModelLimits limits;
            limits.mode = Mode::generate, limits.row_tokens = limits.positions = 128;
            limits.ranks.world = limits.ranks.tp = tp, limits.ranks.rank = size_t(comm.rank);
            room.use(limits);
            Mesh mesh(comm, 1, 0, 1, int(tp));
            const auto model = make_model(CpuF32{1, ctx.get()}, m, limits);
            model->allocate(mesh, false, true);
            model->initialise(1);
            model->take_sent();
            CountedPasses passes(model->generator(), tp);
            generate(passes, room, prompts, settings);
            Payload sent;
            for (const Payload &p : comm.gather(model->take_sent())) sent += p;
            const size_t drawn = prompts.size() * settings.max_new_tokens;
            EXPECT_EQ(sent.tensor, sizeof(float) * (tp - 1) * ((4 * m.L + 2) * m.C * passes.tokens + m.V / tp * drawn));
            return 0;
        });
}

// The table in expert_exchange.h.
TEST(Ranks, DividedExpertsSendWhatTheTableSays) {
    for (const auto &[world, N] : {std::pair<size_t, size_t>{2, 2}, {4, 2}, {4, 4}})
        for (const Recompute recompute : {Recompute::none, Recompute::layer})
            for (const bool frozen : {false, true}) {
                RankCase c{world, 1, SpMode::ring, 12, frozen ? 0 : 3, 1};
                c.experts = N;
                Sending s{c, Layout::contiguous, experts, recompute};
                s.frozen = frozen;
                const ModelConfig m = s.model();
                const size_t E = m.experts.number, rows = world * s.S() * E * (N - 1) / N, b = sizeof(bf16), layers = 2;
                const size_t again = recompute == Recompute::layer, row = (2 + (frozen ? 2 : 3) + again) * m.C * b + 8;
                EXPECT_EQ(expect_predicted<CpuBf16>(s).experts, layers * (rows * row + (1 + again) * world * (N - 1) * E * 4));
            }
}

// ---- bytes held ------------------------------------------------------------------------------------------------------------------------

namespace {

template <class Dev> Plan plan_of(const std::string &name, size_t world, size_t sp, int stage, size_t tokens, size_t tile = 0) {
    ModelLimits limits;
    limits.tile_tokens = tile;
    limits.row_tokens = limits.positions = tokens, limits.recompute = Recompute::layer;
    limits.ranks.world = world, limits.ranks.sp = sp, limits.ranks.zero_stage = stage;
    const auto model = make_model(make_device<Dev>(1), preset(name), limits);
    model->plan().place();
    return model->plan();
}

size_t bytes_of(const Plan &plan, const std::vector<std::string> &names) {
    size_t sum = 0;
    for (const Segment &s : plan.segments())
        if (std::find(names.begin(), names.end(), s.name) != names.end()) sum += s.bytes;
    return sum;
}

}  // namespace

TEST(RankPlans, RanksOfARingShareTheActivations) {
    const auto activations = [](size_t ranks) {
        const Plan plan = plan_of<CpuBf16>("qwen2.5-0.5b", ranks, ranks, 1, 131072);
        return double(plan.bytes() - plan.state_bytes());
    };
    EXPECT_NEAR(8 * activations(8) / activations(1), 1, 0.15);
}

// The arrays of attention hold all tokens, those of the feed-forward network one tile.
TEST(RankPlans, FeedForwardNeedsMemoryForOneTile) {
    const size_t tokens = 65536;
    const auto activations = [&](size_t tile) {
        const Plan plan = plan_of<CpuBf16>("llama3-8b", 1, 1, 1, tokens, tile);
        return double(plan.bytes() - plan.state_bytes()) / double(tokens);
    };
    EXPECT_GT(activations(tokens), activations(0) + 2 * double(preset("llama3-8b").F));
}

// At stage 2 a rank holds a part of the gradients, of the weights' lower halves and of the moments; at stage 3 also of the weights, and whole
// weights of the current and the next layer.
TEST(RankPlans, StagesDivideTheState) {
    std::vector<std::string> divided = {"gradients", "params, lower halves", "adamw m", "adamw v"};
    const ModelConfig c = preset("qwen2.5-0.5b");
    const auto plan = [](size_t world, int stage) { return plan_of<CpuBf16>("qwen2.5-0.5b", world, 1, stage, 2048); };
    const auto near = [](const Plan &p, const std::vector<std::string> &names, double bytes, double allowed) {
        EXPECT_NEAR(double(bytes_of(p, names)), bytes, allowed) << names[0];
    };
    for (int stage : {2, 3}) {
        if (stage == 3) divided.push_back("params");
        const Plan one = plan(1, stage);
        const double embedding = 2 * double(c.V * c.C), layer = (double(bytes_of(one, {"params"})) - embedding) / double(c.L);
        for (size_t world : {2, 4, 8}) {
            const Plan part = plan(world, stage);
            for (const std::string &name : divided) {  // with at most 1 % of padding
                const double parts = double(bytes_of(part, {name}) * world), all = double(bytes_of(one, {name}));
                EXPECT_TRUE(all <= parts && parts <= 1.01 * all) << name << ", " << world;
            }
            if (stage == 2) continue;
            near(part, {"weights.layers.0", "weights.layers.1"}, 2 * layer, 0.01 * layer);
            for (const char *name : {"weights.embedding", "weights.head"}) near(part, {name}, embedding, 0.01 * embedding);
        }
    }
}

// An array that no op of the rehearsal touches would live always (../llmc/core/rehearsal.h). The rehearsal has all ops on each rank, even for a
// row that is shorter than the ring.
TEST(RankPlans, EveryArrayIsTouchedByAnOp) {
    const Offload everything{.activations = true, .optimizer = true, .weights = true, .piece = 4096};
    for (const auto &[model, task] :
         {std::pair{untied, SFT}, {untied, RM}, {adapted, SFT}, {gpt2, SFT}, {norm_after, SFT}, {experts, SFT}})
        for (const SpMode mode : {SpMode::ring, SpMode::gather, SpMode::ulysses})
            for (const Offload &offload : {Offload{}, everything})
                for (size_t rank = 0; rank < 2; rank++) {
                    ModelLimits limits;
                    limits.row_tokens = limits.positions = row_multiple, limits.recompute = Recompute::layer;
                    limits.offload = offload;
                    limits.ranks = {.world = 2, .rank = rank, .sp = 2, .sp_mode = mode, .zero_stage = 3};
                    const auto planned = make_model(make_device<CpuF32>(1), rank_model(model, task), limits);
                    for (const Segment &s : planned->plan().segments())
                        EXPECT_FALSE(s.transient && s.last == Plan::always)
                            << s.name << " of model " << model << ", rank " << rank << ", mode " << int(mode);
                }
}

// ---- plans larger than the memory -----------------------------------------------------------------------------------------------------

namespace {

struct SmallCard final : Memory {
    size_t bytes, alone, a_communicator;  // alone, a_communicator: kept free

    SmallCard(size_t bytes, size_t alone, size_t a_communicator) : bytes(bytes), alone(alone), a_communicator(a_communicator) {}
    size_t reserve(size_t communicators) const override { return alone + communicators * a_communicator; }
    std::string device() const override { return "a card"; }
    size_t available() const override { return bytes; }
    size_t process() const override { return 0; }
    size_t peak() const override { return 0; }
    std::byte *allocate(size_t) override { throw std::logic_error("allocated"); }
    void release(std::byte *, size_t) override {}
    void fill(void *, uint8_t, size_t) override {}
    void write(void *, const void *, size_t) override {}
    void read(void *, const void *, size_t) override {}
};

// A run with rows of 32768 tokens, whose plan does not fit in memory.
struct TooLarge {
    ModelConfig config = rank_model(untied);
    ModelLimits limits;
    std::string recompute = "none";
    Task task = SFT;
    size_t alone = 0, a_communicator = 0;

    explicit TooLarge(size_t longest = 1000) {
        config.max_positions = 65536, limits.row_tokens = 32768, limits.positions = longest;
    }
    // Size of the plan with other limits.
    template <class Change> size_t bytes(Change change) const {
        ModelLimits other = limits;
        change(other);
        const auto model = make_model(make_device<CpuF32>(), config, other);
        model->plan().place();
        return model->plan().bytes();
    }
    size_t bytes_of_rows(size_t tokens) const {
        return bytes([&](ModelLimits &l) {
            l.row_tokens = l.positions = tokens, l.recompute = recompute == "none" ? Recompute::none : Recompute::layer;
        });
    }
    std::string refusal(size_t memory) const {
        SelfComm comm;
        const auto card = [&] { return std::make_unique<SmallCard>(memory, alone, a_communicator); };
        Run run{"train_llama", task, {}, comm, 1, {cpu_models<float>(), card}};
        run.model.config = config, run.model.ranks = limits.ranks;
        run.options.recompute = find_choice<Recompute>(recompute), run.options.dtype = Dtype::f32;
        return error_of([&] { open_model(run, run.model, limits); });
    }
};

}  // namespace

TEST(RankPlans, MessageOfAPlanThatDoesNotFitNamesSmallerOptions) {
    TooLarge run, of_long_samples(20000);
    run.recompute = "auto";
    const size_t half = run.bytes_of_rows(16384), quarter = of_long_samples.bytes_of_rows(8192);
    expect_contains(run.refusal(half), {"the plan needs ", " but only " + human_bytes(half) + " of memory are free (",
                                        "fix: --row_tokens 16384 (now 32768), --dtype bf16"});
    expect_contains(run.refusal(4096), {"fix: --dtype bf16, or a smaller model"});
    expect_contains(of_long_samples.refusal(quarter),
                    {"fix: --row_tokens 8192 (now 32768) with samples of at most --max_len 8192, --recompute layer"});
    of_long_samples.task = DPO;  // a row holds both answers of a pair
    expect_contains(of_long_samples.refusal(quarter), {"with samples of at most --max_len 4096"});
    run.recompute = "none", run.limits.ranks.world = 12;
    expect_contains(run.refusal(run.bytes([](ModelLimits &l) { l.ranks.sp = 4; })),
                    {"fix: --ring_attn_size 4 (now 1), --row_tokens "});
    expect_contains(run.refusal(4096), {"fix: --recompute layer, --dtype bf16"});
}

// The driver loads kernels at their first launch, and communicators allocate buffers.
TEST(RankPlans, LeaveRoomForKernelsAndCommunicators) {
    constexpr size_t KiB = 1024;
    TooLarge run;
    run.alone = 100 * KiB, run.a_communicator = 400 * KiB;
    Ranks &ranks = run.limits.ranks;
    EXPECT_EQ(ranks.communicators(), 0u);
    for (const auto &[world, sp, available, left] :
         {std::tuple(1u, 1u, 1024u, "924.0"), {2, 1, 1024, "524.0"}, {4, 2, 1024, "124.0"}, {4, 2, 99, "0.0"}}) {
        ranks.world = world, ranks.sp = sp;
        expect_contains(run.refusal(available * KiB), {format("only %s KiB of memory are free", left)});
    }
    ranks.zero_group = 2;
    EXPECT_EQ(ranks.communicators(), 4u);  // the world, the ring, the group, its replicas
}
