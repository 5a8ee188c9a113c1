#include "gpu_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/hash.h"
#include "../model/every_call.h"

// The sizes of the tiny model. The parameters that select compiled kernels are kept: the head size, the query heads per KV head, the kinds of layers.
static ModelConfig tiny_config(ModelConfig c) {
    const size_t group = c.H / c.KV;
    c.V = 211, c.L = std::min<size_t>(c.L, 2), c.KV = group == 1 ? 4 : 2, c.H = c.KV * group, c.F = 192;
    c.C = c.gpt2() ? c.H * c.D : 128;
    c.window.resize(c.L);
    for (size_t &window : c.window) window = std::min<size_t>(window, 24);
    return c;
}
static ModelLimits tiny_limits(ModelLimits l) {
    l.row_tokens = l.positions = l.tile_tokens = 2 * row_multiple;
    l.ranks = {}, l.offload = {}, l.graphs = false, l.concurrent = false;
    if (l.cache_pages) l.sequences = 2, l.sequence_pages = 2, l.cache_pages = 4, l.draws = 2;
    return l;
}

namespace {
using Bytes = std::vector<std::byte>;
using Arrays = std::map<std::string, Bytes>;
bool same(const Bytes &a, const Bytes &b) { return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size()); }
struct OpResult {
    OpKey op;
    Arrays written;  // by name, if a later op reads it
};

struct TinyModel {
    std::unique_ptr<Model> model;
    SelfComm comm{};
    Mesh mesh{comm, 1, 0};

    // Calls see(op, the arrays that a later op reads) after each op. Returns the result of make_every_call().
    template <class F>
    std::map<std::string, std::vector<double>> run(const ModelConfig &config, const ModelLimits &limits, F see) {
        model->allocate(mesh, false, false);
        model->initialise(1);
        const auto inspect = [&](const OpKey &op) {
            const size_t now = model->trace().times().at(op);
            std::vector<const Segment *> results;
            for (const Segment &s : model->plan().segments())
                if (s.first <= now && now < s.last && !s.guest && !s.name.ends_with("scratch")) results.push_back(&s);
            see(op, results);
        };
        model->trace().inspect(inspect);
        const size_t T = limits.row_tokens, first = T / 3;  // two documents with repeated tokens
        std::vector<std::vector<int32_t>> documents(2);
        for (size_t t = 0; t < T; t++) documents[t < first ? 0 : 1].push_back(int32_t(t * t % 131));
        auto values = make_every_call(*model, documents, config, limits);
        model->trace().end_inspection();
        return values;
    }
    Bytes bytes_of(const Segment &s) { return read(model->memory(), static_cast<const std::byte *>(*s.pointer), s.bytes); }
};

template <class X> std::string difference(const X *got, const X *want, size_t n, double share) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(double(want[i])));
    for (size_t i = 0; i < n; i++)
        if (!(std::fabs(double(got[i]) - double(want[i])) <= share * largest))
            return format("[%zu] is %.6g and should be %.6g, give or take %.2g", i, double(got[i]), double(want[i]),
                          share * largest);
    return "";
}
constexpr double rounded_share = 0x1p-6, float_share = 0x1p-14;  // four roundings of a bf16; float sums of some hundred terms

// Only floats are compared: integers come from the host, and codes and lower halves may differ by one even if the floats that they encode agree.
std::string difference(const std::string &dtype, const Bytes &got, const Bytes &want, double share) {
    const auto as = [&]<class X>(X, double share) {
        return difference(reinterpret_cast<const X *>(got.data()), reinterpret_cast<const X *>(want.data()),
                          want.size() / sizeof(X), share);
    };
    return dtype == dtype_name<float> ? as(0.0f, share) : dtype == dtype_name<bf16> ? as(bf16(), rounded_share) : "";
}
}  // namespace

size_t check_gpu(const ModelFactory &gpu, const ModelFactory &cpu, const ModelConfig &config, const ModelLimits &limits,
                 bool rounded) {
    const ModelConfig c = tiny_config(config);
    const ModelLimits l = tiny_limits(limits);
    std::vector<OpResult> results;
    Arrays now;
    TinyModel on_cpu{cpu(c, l)}, on_gpu{gpu(c, l)};
    const auto want_values = on_cpu.run(c, l, [&](const OpKey &op, const std::vector<const Segment *> &arrays) {
        results.push_back({op, {}});
        for (const Segment *s : arrays)
            if (Bytes bytes = on_cpu.bytes_of(*s); !same(now[s->name], bytes))
                results.back().written[s->name] = now[s->name] = std::move(bytes);
    });

    const double share = rounded ? rounded_share : float_share;
    const auto expect_none = [&](const std::string &what, const std::string &array, const std::string &difference) {
        if (!difference.empty())
            die("GPU check: %s on %s does not agree with the CPU: %s%s\n"
                "  fix: do not train on this GPU with this program. Build again (make clean; make), try another driver, or --device cpu; "
                "scripts/gpu_check.sh finds out more",
                what.c_str(), on_gpu.model->memory().device().c_str(), array.c_str(), difference.c_str());
    };
    size_t done = 0;
    now.clear();
    const auto values = on_gpu.run(c, l, [&](const OpKey &op, const std::vector<const Segment *> &arrays) {
        if (done == results.size() || results[done].op != op) die("the check of the GPU runs other ops there than on the CPU");
        for (auto &[name, bytes] : results[done++].written) now[name] = std::move(bytes);
        for (const Segment *s : arrays) {
            const auto want = now.find(s->name);
            if (want == now.end() || want->second.size() != s->bytes) continue;  // scratch: its size depends on the device
            const Bytes got = on_gpu.bytes_of(*s);
            if (same(got, want->second)) continue;  // an op changes few arrays, so most comparisons end here
            expect_none(on_gpu.model->trace().describe(op), s->name, difference(s->dtype, got, want->second, share));
            write(on_gpu.model->memory(), static_cast<std::byte *>(*s->pointer), want->second);
        }
    });
    for (const auto &[what, want] : want_values)
        expect_none(what, what, difference(values.at(what).data(), want.data(), want.size(), share));
    std::set<std::pair<size_t, size_t>> ops;
    for (const OpResult &r : results) ops.insert({r.op.phase, r.op.op});
    return ops.size();
}

std::string kernels_of(const ModelConfig &c, const ModelLimits &l) {
    return format(
        "%s, heads of %zu, %zu queries a key/value head, %d bits, adapters %d, reward %d, mode %d, cache %d, muon %d, moments %d, bf16 gradients %d, fp8 %d",
        c.family.c_str(), c.D, c.H / c.KV, c.weight_bits, c.lora.rank > 0, c.reward, int(l.mode), l.cache_pages > 0, l.muon,
        int(l.moments), l.bf16_gradients, l.fp8);
}

// Returns the path of an empty file in the cache, named by all inputs that could change a result.
static std::string memory_of(const std::string &key) {
    const InputFile program("/proc/self/exe");
    return cache_file("gpu_check_" + hash_of(key + " " + fingerprint(program)));
}

bool gpu_check_is_due(GpuCheck wanted, const std::string &key) {
    return wanted == GpuCheck::always || (wanted == GpuCheck::once && !std::filesystem::exists(memory_of(key)));
}
void remember_gpu_check(const std::string &key) { write_file(memory_of(key), ""); }
