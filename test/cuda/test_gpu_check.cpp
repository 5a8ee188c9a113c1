// The check of a GPU before the first step.
#include "../../llmc/app/gpu_check.h"

#include "../errors.h"
#include "../models.h"
#include "matmul_context.cuh"

namespace {
ModelConfig with_adapters(ModelConfig config) {
    config.lora.rank = 8, config.lora.dropout = 0.1, config.lora.targets = {"q_proj", "down_proj"};
    return config;
}
}  // namespace

template <class Dev> struct GpuChecks : testing::Test {
    const std::unique_ptr<CudaContext> context = make_cuda_context(1);
#ifdef LLMC_EMULATE
    CUstream_st stream{0};
#endif
    size_t agreeing(const ModelConfig &config, const ModelLimits &limits) {
        Dev dev = {};
        dev.ctx = context.get();
#ifdef LLMC_EMULATE
        dev.stream = &stream;
#endif
        using X = typename Dev::X;
        return check_gpu(models_on(dev), cpu_models<X>(), config, limits, sizeof(X) == 2);
    }
};
TYPED_TEST_SUITE(GpuChecks, CudaDevices);

TYPED_TEST(GpuChecks, OpsOfEachKindOfModelAgreeWithTheCpu) {
    ModelLimits trains, generates, compact, muon;
    generates.mode = Mode::generate, generates.cache_pages = 1;
    compact.moments = Moments::blockwise, compact.bf16_gradients = true, compact.recompute = Recompute::layer;
    muon.muon = true;
    EXPECT_EQ(this->agreeing(preset("qwen3-0.6b"), trains), 28u);
    EXPECT_EQ(this->agreeing(preset("d12"), trains), 26u);
    EXPECT_EQ(this->agreeing(preset("smollm2-135m"), compact), 35u);
    EXPECT_EQ(this->agreeing(preset("smollm2-135m"), muon), 28u);
    EXPECT_EQ(this->agreeing(preset("qwen2.5-0.5b"), generates), 13u);
    ModelConfig config = with_adapters(preset("phi3-mini-4k"));
    config.weight_bits = 4;
    make_reward(config);
    EXPECT_EQ(this->agreeing(config, trains), 27u);
}

// A model with other settings stands for a broken kernel.
TEST(CudaCheckNames, TheOpAndTheArray) {
    const auto message_if = [](auto change) -> std::string {
        const ModelFactory right = cpu_models<float>(),
                           wrong = [&](ModelConfig c, const ModelLimits &l) { return change(c), right(c, l); };
        const std::string text = error_of([&] { check_gpu(wrong, right, preset("qwen3-0.6b"), {}, false); });
        if (text != "no error") expect_contains(text, {"\n  fix: do not train on this GPU"});
        return text.starts_with("GPU check: ") ? text.substr(11, text.find('[') - 11) : text;
    };
    EXPECT_EQ(message_if([](ModelConfig &) {}), "no error");
    EXPECT_EQ(message_if([](ModelConfig &c) { c.eps = 1e-3f; }),
              "forward, layer 0, norm 1 on cpu does not agree with the CPU: act.0.ln1");
    EXPECT_EQ(message_if([](ModelConfig &c) { c.eps = NAN; }),
              "forward, layer 0, norm 1 on cpu does not agree with the CPU: act.0.ln1");
    EXPECT_EQ(message_if([](ModelConfig &c) { c.rope.theta *= 2; }),
              "zero gradients on cpu does not agree with the CPU: rope table");
    EXPECT_EQ(message_if([](ModelConfig &c) { c.window[1] = 1; }),
              "forward, layer 1, attention on cpu does not agree with the CPU: act.1.att");
}
