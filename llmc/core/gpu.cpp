#include "gpu.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>

#include "common.h"

static std::string version(int cuda) { return format("%d.%d", cuda / 1000, cuda % 1000 / 10); }

static std::string list(const std::vector<int> &archs) {
    std::string out;
    for (int arch : archs) out += format("%s%d.%d", out.empty() ? "" : ", ", arch / 10, arch % 10);
    return out;
}

// Kernels for 8.0 run on 8.6 but not on 9.0. The newest kernels are also included as PTX, which the driver compiles for any later GPU.
static bool runs_on(int arch, const std::vector<int> &archs) {
    const bool same_major = std::any_of(archs.begin(), archs.end(), [&](int a) { return a / 10 == arch / 10 && a <= arch; });
    return same_major || (!archs.empty() && archs.back() <= arch);
}

// The reason why the GPU cannot be used, and the fix; empty if it can be used.
struct Reason {
    std::string cause, fix;
};
// Returns the reason why the program's kernels do not run on one of the GPUs.
static Reason reason_against(const GpuQuery &q, size_t device) {
    const auto &gpu = q.gpus[device];
    if (runs_on(gpu.arch, q.archs)) return {};
    const std::string cause = format("%s has compute capability %d.%d, this program has kernels for %s", gpu.name.c_str(),
                                     gpu.arch / 10, gpu.arch % 10, list(q.archs).c_str());
    if (gpu.arch < 80) return {cause, "a GPU of 8.0 (Ampere) or later: the kernels need its bf16"};
    std::set<int> archs;  // of all usable GPUs of this machine
    for (const auto &other : q.gpus)
        if (other.arch >= 80) archs.insert(other.arch);
    std::string wanted;
    for (int arch : archs) wanted += format("%s%d", wanted.empty() ? "" : " ", arch);
    return {cause, format(archs.size() == 1 ? "build with GPU_ARCHS=%s" : "build with GPU_ARCHS=\"%s\"", wanted.c_str())};
}
static Reason reason_against(const GpuQuery &q) {
    if (!q.compiled) return {"this program was built without CUDA", "make probe && make, where there is nvcc"};
    if (q.driver == 0) return {"there is no NVIDIA driver", "install one"};
    if (q.driver / 1000 < q.runtime / 1000)
        return {format("the driver is for CUDA %s, this program was built with %s", version(q.driver).c_str(),
                       version(q.runtime).c_str()),
                format("install a driver for CUDA %d, or build with CUDA %d", q.runtime / 1000, q.driver / 1000)};
    if (q.gpus.empty())
        return {q.error.empty() ? "the driver shows no GPU" : q.error, "look at nvidia-smi and at CUDA_VISIBLE_DEVICES"};
    return reason_against(q, 0);
}

bool use_gpu(const std::string &device, const GpuQuery &query, std::string &note) {
    if (device == "cpu") return false;
    const Reason reason = reason_against(query);
    if (reason.cause.empty()) return true;
    if (device == "cuda") die("no CUDA device: %s\n  fix: %s, or --device cpu", reason.cause.c_str(), reason.fix.c_str());
    if (query.driver) note = "no CUDA device: " + reason.cause + "; using the CPU";
    return false;
}

void need_kernels(const GpuQuery &query, size_t device) {
    if (device >= query.gpus.size()) return;  // nothing is known about this GPU
    const Reason reason = reason_against(query, device);
    if (!reason.cause.empty())
        die("GPU %zu: %s\n  fix: %s, or leave it out by CUDA_VISIBLE_DEVICES", device, reason.cause.c_str(), reason.fix.c_str());
}

int pick_gpu(const std::vector<std::string> &hosts, const std::vector<std::string> &gpus, size_t rank, int count) {
    int before = 0, ranks = 0;
    for (size_t r = 0; r < hosts.size(); r++)
        if (hosts[r] == hosts[rank] && gpus[r] == gpus[rank]) ranks++, before += r < rank;
    if (ranks > count)
        die("%d ranks on %s but %d GPU%s\n  fix: -np %d there, or --device cpu", ranks, hosts[rank].c_str(), count,
            count == 1 ? "" : "s", count);
    return before;
}

// Peak rates of dense bf16 products with float sums, from NVIDIA's data sheets (figures with sparsity are halved): A100 (2021), A30, A10, A40, L4,
// L40S, H100, H200, GH200, B200 (HGX); for GeForce and RTX cards from the tables of the architecture papers GA102, AD102 and RTX Blackwell.
struct Peak {
    const char *device;
    double tflops;
};
static const Peak peaks[] = {
    {"NVIDIA A100-SXM4-40GB", 312},
    {"NVIDIA A100-SXM4-80GB", 312},
    {"NVIDIA A100-PCIE-40GB", 312},
    {"NVIDIA A100 80GB PCIe", 312},
    {"NVIDIA H100 80GB HBM3", 989.4},
    {"NVIDIA H100 PCIe", 756},
    {"NVIDIA H200", 989.4},
    {"NVIDIA GH200 480GB", 989.4},
    {"NVIDIA B200", 2250},
    {"NVIDIA A30", 165},
    {"NVIDIA A40", 149.7},
    {"NVIDIA A10", 125},
    {"NVIDIA L4", 121},
    {"NVIDIA L40S", 362},
    {"NVIDIA RTX A6000", 154.8},
    {"NVIDIA GeForce RTX 3090", 71},
    {"NVIDIA GeForce RTX 4090", 165.2},
    {"NVIDIA GeForce RTX 5090", 209.5},
};

double gpu_peak(const std::string &device, const std::string &dtype) {
    for (const Peak &peak : peaks)
        if (device == peak.device && dtype == "bf16") return peak.tflops * 1e12;
    return 0;
}

// Peaks of bf16 products and memory bandwidths are from the data sheets. Links are NVLink 3 or 4, else the card's PCIe 4 or 5.
struct KnownGpu {
    const char *name;
    double gib, tflops, memory, link, host, network;  // the last four in GB/s; network: a GPU's share of its host's
};
static const KnownGpu known_gpus[] = {{"rtx3090", 24, 71, 936, 25, 25, 1.5},       {"rtx4090", 24, 165.2, 1008, 25, 25, 1.5},
                                      {"rtx5090", 32, 209.5, 1792, 50, 50, 1.5},   {"a10", 24, 125, 600, 25, 25, 1.5},
                                      {"l4", 24, 121, 300, 25, 25, 1.5},           {"l40s", 48, 362, 864, 25, 25, 1.5},
                                      {"a6000", 48, 154.8, 768, 25, 25, 1.5},      {"a100-40", 40, 312, 1555, 300, 25, 25},
                                      {"a100", 80, 312, 2039, 300, 25, 25},        {"h100", 80, 989.4, 3350, 450, 50, 50},
                                      {"h200", 141, 989.4, 4800, 450, 50, 50},     {"b200", 180, 0, 8000, 900, 50, 50},
                                      {"rtxpro6000", 96, 503.8, 1792, 50, 50, 1.5}};
static constexpr double usable = 0.94;  // share of a GPU's memory; driver, cuBLAS and fragmented pages take the rest

size_t gpu_memory(const std::string &name) {
    std::string known;
    for (const KnownGpu &gpu : known_gpus) {
        if (name == gpu.name) return size_t(gpu.gib * usable * double(1 << 30));
        known += std::string(known.empty() ? "" : ", ") + gpu.name;
    }
    char *end;
    const double gib = strtod(name.c_str(), &end);
    if (*end || !(gib > 0))
        die("--gpu %s is not known\n  fix: give one of %s, or its memory in GiB", name.c_str(), known.c_str());
    return size_t(gib * usable * double(1 << 30));
}

// Narrow heads have fewer FLOPs per exponential. In a short document the causal mask cuts a larger share of the tiles, and a block has less work
// after its first loads.
struct AttentionFit {
    double limit, narrow, few, power;  // limit: share of the peak for wide heads and long documents
    double share(double D, double keys) const {
        return limit * D / (D + narrow) * keys / (keys + few * std::pow(D / 128, power));
    }
};
// Forward and backward, fitted to an H200: heads of 64 and 128, documents of 1024 to 16384 tokens, and of 32768 with wgmma
// (docs/attention_hopper.md).
static constexpr AttentionFit with_mma[] = {{0.534, 69, 1024, 1}, {0.357, 69, 1024, 1}},
                              with_wgmma[] = {{0.982, 46, 1250, -1}, {0.943, 96, 900, -1}};

double attention_rate(const GpuRates &gpu, size_t D, size_t keys, bool backward) {
    const bool wgmma = gpu.wgmma && (D == 64 || D == 128);
    return gpu.peak * (wgmma ? with_wgmma : with_mma)[backward].share(double(std::min<size_t>(D, 128)), double(keys));
}

bool gpu_has_fp8(const std::string &name) {
    for (const char *before : {"rtx3090", "a10", "a6000", "a100-40", "a100"})  // compute capability 8.0 and 8.6
        if (name == before) return false;
    return true;
}

std::optional<GpuRates> gpu_rates(const std::string &name) {
    // Shares of the data sheet's peaks: products and memory reach these on one H200 (docs/benchmarks.md, "GPUs"), the link's share is from
    // NCCL's collectives, which others published. Other GPUs were not measured.
    constexpr double products = 0.66, memory = 0.9, link = 0.82, network = 0.95;
    for (const KnownGpu &gpu : known_gpus) {
        if (name != gpu.name || gpu.tflops == 0) continue;
        const double peak = gpu.tflops * 1e12;
        const bool nvlink = gpu.link > gpu.host, hopper = name == "h100" || name == "h200";
        const double grouped = hopper ? 0.155 : 0.3;  // 64 experts with 256 rows each; on an A100 by dev/emulator/gpu_model.md
        const double delta = 9.7e10;  // an H100's by dev/cuda/ladder_counts.md; an A100 has 0.8 of it, an RTX 4090 1.4
        return GpuRates{products * peak,
                        grouped * peak,
                        delta,
                        peak,
                        memory * gpu.memory * 1e9,
                        (nvlink ? link : 1) * gpu.link * 1e9,
                        network * gpu.network * 1e9,
                        gpu.host * 1e9,
                        hopper ? 0.1 : 0.3,
                        hopper};
    }
    return {};
}
