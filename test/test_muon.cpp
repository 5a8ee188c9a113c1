// Muon compared with torch.optim.Muon, on the matrices of golden/make_muon.py.
#include "../llmc/core/json.h"
#include "../llmc/parallel/optimizer.h"
#include "reference_muon.h"

namespace {

std::vector<double> joined(const nlohmann::json &matrices, const char *name) {
    std::vector<double> out;
    for (const auto &m : matrices)
        for (double x : m[name]) out.push_back(x);
    return out;
}

// The matrices, as one layer, after all steps.
template <class X> std::vector<double> updated(const nlohmann::json &golden) {
    std::vector<Tensor> table;
    size_t count = 0, steps = 0;
    for (const auto &m : golden["matrices"]) {
        const std::vector<size_t> shape = m["shape"];
        table.push_back(
            {format("matrix.%zu", table.size()), shape, Tensor::normal, true, count, shape[0] * shape[1], false, true, true});
        count += table.back().count, steps = m["gradients"].size();
    }
    SelfComm comm;
    HostMemory memory;
    Zero<Cpu<X>> zero(make_device<Cpu<X>>(2), Sharding({{0, count}}, 0, 1, 0, 0), table);
    Optimizer<Cpu<X>> optimizer;
    Plan plan;
    optimizer.plan(plan, zero, Moments::f32, 0, true);
    plan.place();
    const Arena arena(plan, memory);
    const auto params = zero.params_at({0, 0, 0, count});
    const auto start = joined(golden["matrices"], "start");
    for (size_t i = 0; i < count; i++) params.store(i, float(start[i]));
    for (size_t step = 1; step <= steps; step++) {
        for (size_t t = 0; t < table.size(); t++) {
            const std::vector<double> gradient = golden["matrices"][t]["gradients"][step - 1];
            std::copy(gradient.begin(), gradient.end(), zero.gradients.floats + table[t].offset);
        }
        AdamW settings{};
        settings.lr = golden["lr"], settings.weight_decay = golden["weight_decay"], settings.grad_scale = 1, settings.step = step;
        optimizer.update(zero, comm, memory, settings);
    }
    std::vector<double> out(count);
    for (size_t i = 0; i < count; i++) out[i] = params.load(i);
    return out;
}

}  // namespace

// Float parameters are rounded twice a step, and the roundings of the iteration in float are 2^-16 of those in bf16. In bf16 the allowed error is
// 1.5 times that of torch.
TEST(MuonGolden, EqualsTorch) {
    const auto golden = read_json("test/golden/muon.json");
    const auto want = joined(golden["matrices"], "updated"), start = joined(golden["matrices"], "start");
    const double steps = double(golden["matrices"][0]["gradients"].size());
    const double decay = std::pow(1 - golden["lr"].get<double>() * golden["weight_decay"].get<double>(), steps);
    std::vector<double> decayed = start;
    for (double &x : decayed) x *= decay;
    const double moved = distance(want, decayed), of_torch = golden["bf16_error"];
    const auto expect = [&](const char *what, const std::vector<double> &got, double allowed) {
        const double error = distance(got, want) / moved;
        printf("  %-40s %.2g of %.2g allowed\n", what, error, allowed);
        EXPECT_LE(error, allowed) << what;
    };
    expect("f32, updates", updated<float>(golden), 2 * steps * 0x1p-24 * norm_of(start) / moved + 8 * 0x1p-16 * of_torch);
    expect("bf16, updates", updated<bf16>(golden), 1.5 * of_torch);
}
