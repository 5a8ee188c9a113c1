// A run's choice of device, and its messages without a device or with a plan that exceeds it: with made-up answers of the driver.
#include "../llmc/core/gpu.h"

#include "../llmc/train/open_model.h"
#include "errors.h"

namespace {

GpuQuery healthy() {  // an H100, as a program built with CUDA 13.0 sees it
    GpuQuery q;
    q.compiled = true, q.archs = {80, 90, 100}, q.runtime = 13000, q.driver = 13010, q.gpus = {{"NVIDIA H100", 90}};
    return q;
}

void expect_none(const GpuQuery &q, const std::string &cause, const std::string &fix) {
    std::string note;
    EXPECT_FALSE(use_gpu("auto", q, note));
    EXPECT_EQ(note, q.driver ? "no CUDA device: " + cause + "; using the CPU" : "");
    expect_error([&] { use_gpu("cuda", q, note); }, {"no CUDA device: " + cause, "fix: " + fix, "or --device cpu"});
}

}  // namespace

TEST(Devices, AGpuIsTakenUnlessTheCpuIsAskedFor) {
    std::string note;
    EXPECT_TRUE(use_gpu("auto", healthy(), note));
    EXPECT_TRUE(use_gpu("cuda", healthy(), note));
    EXPECT_FALSE(use_gpu("cpu", healthy(), note));
    EXPECT_EQ(note, "");
}

TEST(Devices, WhyThereIsNone) {
    GpuQuery q;
    expect_none(q, "this program was built without CUDA", "make probe && make, where there is nvcc");
    q.driver = 1;
    expect_none(q, "this program was built without CUDA", "make probe && make, where there is nvcc");
    q = healthy();
    q.driver = 0;
    expect_none(q, "there is no NVIDIA driver", "install one");
    q.driver = 12080;
    expect_none(q, "the driver is for CUDA 12.8, this program was built with 13.0",
                "a driver for CUDA 13, or build with CUDA 12");
    q = healthy(), q.gpus.clear();
    expect_none(q, "the driver shows no GPU", "look at nvidia-smi and at CUDA_VISIBLE_DEVICES");
    q.error = "no CUDA-capable device is detected";
    expect_none(q, "no CUDA-capable device is detected", "look at nvidia-smi");
}

TEST(Devices, RanksOfAHostTakeOneGpuEach) {
    const std::vector<std::string> hosts = {"a", "b", "a", "b", "a"}, all(5, "0,1"), own = {"0", "0", "1", "1", "2"};
    const int want[] = {0, 0, 1, 1, 2};
    for (size_t r = 0; r < 5; r++) EXPECT_EQ(pick_gpu(hosts, all, r, 3), want[r]);
    for (size_t r = 0; r < 5; r++) EXPECT_EQ(pick_gpu(hosts, own, r, 1), 0);  // each was given one
    EXPECT_EQ(error_of([&] { pick_gpu(hosts, all, 0, 2); }), "3 ranks on a but 2 GPUs\n  fix: -np 2 there, or --device cpu");
    EXPECT_EQ(error_of([&] { pick_gpu(hosts, all, 1, 1); }), "2 ranks on b but 1 GPU\n  fix: -np 1 there, or --device cpu");
}

TEST(Devices, GpusOlderThanTheProgram) {
    GpuQuery q = healthy();
    q.gpus = {{"Tesla T4", 75}};
    expect_none(q, "Tesla T4 has compute capability 7.5, this program has kernels for 8.0, 9.0, 10.0",
                "a GPU of 8.0 (Ampere) or later");
    q.archs = {90}, q.gpus = {{"NVIDIA A100", 80}};
    expect_none(q, "NVIDIA A100 has compute capability 8.0, this program has kernels for 9.0", "build with GPU_ARCHS=80");
    std::string note;
    q.archs = {80, 90, 100};
    for (int arch : {86, 89, 103, 120}) {  // the same major, or newer than all: from PTX
        q.gpus = {{"another", arch}};
        EXPECT_TRUE(use_gpu("cuda", q, note)) << arch;
    }
    q.archs = {80, 100}, q.gpus = {{"NVIDIA H100", 90}};
    EXPECT_FALSE(use_gpu("auto", q, note));
}

TEST(Devices, TwoKindsOfGpuInAMachine) {
    GpuQuery q = healthy();
    std::string note;
    q.archs = {90}, q.gpus = {{"NVIDIA H100", 90}, {"NVIDIA A100", 80}, {"Tesla T4", 75}};
    EXPECT_TRUE(use_gpu("cuda", q, note)) << "a rank alone takes the first";
    EXPECT_EQ(error_of([&] { need_kernels(q, 0); }), "no error");
    EXPECT_EQ(error_of([&] { need_kernels(q, 1); }),
              "GPU 1: NVIDIA A100 has compute capability 8.0, this program has kernels for 9.0\n"
              "  fix: build with GPU_ARCHS=\"80 90\", or leave it out by CUDA_VISIBLE_DEVICES");
    expect_error([&] { need_kernels(q, 2); }, {"GPU 2: Tesla T4", "a GPU of 8.0 (Ampere) or later"});
    q.archs = {80, 90};
    EXPECT_EQ(error_of([&] { need_kernels(q, 1); }), "no error");
}

// ---- a plan larger than the card ------------------------------------------------------------------------------------------------------

namespace {

constexpr size_t MiB = size_t(1) << 20;

class SmallCard final : public Memory {  // 1 GiB
  public:
    size_t alone = 0, a_communicator = 0;  // kept free
    size_t reserve(size_t communicators) const override { return alone + communicators * a_communicator; }
    std::string device() const override { return "a card of 1 GiB"; }
    size_t available() const override { return 1024 * MiB; }
    size_t process() const override { return 0; }
    size_t peak() const override { return 0; }
    std::byte *allocate(size_t) override { throw std::logic_error("allocated"); }
    void release(std::byte *, size_t) override {}
    void fill(void *, uint8_t, size_t) override {}
    void write(void *, const void *, size_t) override {}
    void read(void *, const void *, size_t) override {}
};

// 512 MiB of parameters, and for every token 64 KiB, or half with --recompute layer.
class PlannedModel final : public Model {
    Plan plan_;
    SmallCard card_;
    std::byte *parameters_, *activations_;

  public:
    PlannedModel(const ModelLimits &limits, size_t parameter_bytes, const SmallCard &card) : card_(card) {
        plan_.add(&parameters_, "parameters", {parameter_bytes});
        plan_.add(&activations_, "activations",
                  {limits.row_tokens / limits.ranks.sp, size_t(limits.recompute == Recompute::layer ? 32 : 64) << 10});
    }
    Plan &plan() override { return plan_; }
    RehearsedSteps rehearse_steps(size_t) override { throw std::logic_error("no steps"); }
    Memory &memory() override { return card_; }
    std::string store_name() const override { return ""; }
    void profile() override {}
    Trace &trace() override { throw std::logic_error("no trace"); }
    Generator &generator() override { throw std::logic_error("no generator"); }
    void allocate(Mesh &, bool, bool) override { throw std::logic_error("allocated"); }
    Arena &arena() override { throw std::logic_error("no arena"); }
    const std::vector<Tensor> &tensors() const override { throw std::logic_error("no tensors"); }
    const std::vector<Tensor> &frozen_tensors() const override { throw std::logic_error("no tensors"); }
    void load(const HfWeights &, uint64_t) override {}
    void load_adapters(const HfWeights &, uint64_t) override {}
    void randomise(std::optional<uint64_t>) override {}
    std::vector<double> evaluate_base(const Row &) override { return {}; }
    void initialise(uint64_t) override {}
    void save(const std::string &, const std::string &) override {}
    std::vector<double> evaluate(const Row &) override { return {}; }
    void backward(std::span<const float>, float, bool) override {}
    void zero_gradients(uint64_t) override {}
    void accumulate(const Row &, float, bool) override {}
    void count_routing(const Row &, bool) override {}
    Routing routing() override { return {}; }
    LossSums take_sums() override { return {}; }
    double gradient_norm() override { return 0; }
    std::string nonfinite_gradient() override { return ""; }
    void update(const AdamW &) override {}
    OptimizerState optimizer_state() override { return {}; }
    void optimizer_state_loaded() override {}
    void gather_parameters() override {}
    void copy_parameters_to(Model &) override {}
    Payload take_sent() override { return {}; }
    double model_flops(const Row &) const override { return 0; }
};

std::string refusal(size_t parameters, size_t longest, const std::string &recompute, const Ranks &ranks = {}, Task task = SFT,
                    const SmallCard &card = {}) {
    SelfComm comm;
    Run run{"train_llama", task, {}, comm, 1, {}};
    run.device.make_memory = [&] { return std::make_unique<SmallCard>(card); };
    run.device.make_model = [&](const ModelConfig &, const ModelLimits &l) {
        return std::make_unique<PlannedModel>(l, parameters, card);
    };
    run.model.config.max_positions = 65536;
    run.options.recompute = recompute, run.options.dtype = "f32";
    run.model.ranks = ranks;
    ModelLimits limits;
    limits.row_tokens = 32768, limits.positions = longest;
    return error_of([&] { open_model(run, run.model, limits); });
}

}  // namespace

TEST(Devices, APlanLargerThanTheCardSaysWhatToChangeAndByHowMuch) {
    expect_contains(refusal(512 * MiB, 1000, "auto"),
                    {"the plan needs 1.50 GiB but only 1.00 GiB of memory are free (a card of 1 GiB)",
                     "fix: --row_tokens 16384 (now 32768), --dtype bf16"});
    expect_contains(refusal(512 * MiB, 20000, "none"),
                    {"the plan needs 2.50 GiB",
                     "fix: --row_tokens 8192 (now 32768) with samples of at most --max_len 8192, --recompute layer"});
    expect_contains(refusal(2048 * MiB, 1000, "auto"), {"the plan needs 3.00 GiB", "fix: --dtype bf16, or a smaller model"});
    expect_contains(refusal(512 * MiB, 20000, "none", {}, DPO),  // a row holds both answers of a pair
                    {"fix: --row_tokens 8192 (now 32768) with samples of at most --max_len 4096"});
    Ranks ranks;
    ranks.world = 12;
    expect_contains(refusal(512 * MiB, 1000, "none", ranks),  // 512 + 2048 / 4
                    {"the plan needs 2.50 GiB", "fix: --ring_attn_size 4 (now 1), --row_tokens 8192 (now 32768)"});
    expect_contains(refusal(1024 * MiB, 1000, "none", ranks), {"the plan needs 3.00 GiB", "fix: --recompute layer"});
}

// Kernels that the driver loads when they first run, and the buffers of communication among ranks.
TEST(Devices, APlanLeavesRoomForWhatIsLoadedLater) {
    SmallCard card;
    card.alone = 100 * MiB, card.a_communicator = 400 * MiB;
    Ranks two, rings;
    two.world = 2, rings.world = 4, rings.sp = 2;
    expect_contains(refusal(950 * MiB, 1000, "layer", {}, SFT, card), {"only 924.0 MiB of memory are free"});
    expect_contains(refusal(10 * MiB, 1000, "layer", two, SFT, card),
                    {"the plan needs 1.01 GiB but only 524.0 MiB of memory are free"});
    expect_contains(refusal(10 * MiB, 1000, "layer", rings, SFT, card), {"only 124.0 MiB of memory are free"});
    rings.zero_group = 2;
    EXPECT_EQ(rings.communicators(), 4u);  // the world, the ring, the group, its replicas
    EXPECT_EQ(Ranks().communicators(), 0u);
    card.alone = 2048 * MiB;  // more than there is
    expect_contains(refusal(10 * MiB, 1000, "layer", {}, SFT, card), {"only 0.0 KiB of memory are free"});
}
