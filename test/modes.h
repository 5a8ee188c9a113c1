// A step computes the same bits whatever the model did before it: evaluations, passes of the base model and generation between steps, and launches that
// are recorded and replayed, leave nothing behind.
#pragma once
#include <gtest/gtest.h>

#include "../llmc/model/every_call.h"
#include "models.h"
#include "rank_cases.h"

struct ModeCase {
    bool fp8, adapters, offload;
    Recompute recompute;

    std::string name() const {
        return std::string(fp8 ? "fp8 " : "") + (adapters ? "adapters " : "") + (offload ? "offload " : "") +
               (recompute == Recompute::layer ? "recompute layer" : "recompute none");
    }
};

inline std::vector<ModeCase> mode_cases() {
    std::vector<ModeCase> cases;
    for (bool fp8 : {false, true})
        for (bool adapters : {false, true})
            for (bool offload : {false, true})
                for (Recompute recompute : {Recompute::none, Recompute::layer})
                    cases.push_back({fp8, adapters, offload, recompute});
    return cases;
}

// The losses and gradient norms of four steps: two of one micro-step, and two of two, in which the second backward pass runs for the first time while all
// other launches are replayed. `visited`: with passes of other kinds between the steps, and with recorded launches.
template <class Dev> std::vector<double> losses_and_norms(Dev dev, const ModeCase &c, bool visited) {
    ModelConfig config = rank_model(c.adapters ? adapted : untied);
    config.L = 2, config.window = {0, 7}, config.H = 2, config.KV = 1, config.lora.dropout = 0;  // dropout is never recorded
    const size_t T = 64;
    std::vector<std::vector<int32_t>> documents(2);
    std::vector<std::vector<uint8_t>> masks(2);
    for (size_t d = 0; d < 2; d++)
        for (size_t t = 0; t < T / 2; t++) documents[d].push_back(int32_t((d + t * t) % 97)), masks[d].push_back(1);
    const Row row = make_row(documents, masks);

    ModelLimits limits;
    limits.row_tokens = T, limits.positions = 128, limits.recompute = c.recompute, limits.graphs = visited, limits.fp8 = c.fp8;
    limits.offload = {.activations = c.offload, .optimizer = c.offload, .weights = c.offload, .dir = testing::TempDir()};
    limits.neftune_alpha = 5, limits.cache_pages = 4, limits.sequences = 2, limits.sequence_pages = 2;
    SelfComm comm;
    Mesh mesh(comm, 1);
    const auto model = make_model(dev, config, limits);
    model->allocate(mesh, false, false);
    model->initialise(1);
    if (c.adapters) fill_adapters(*model, mesh.shards);
    std::vector<double> out;
    for (size_t step = 1; step <= 4; step++) {
        model->randomise(step);
        model->zero_gradients(step);
        if (step > 2) model->accumulate(row, 0.01f, false);
        model->accumulate(row, 0.01f, true);
        out.push_back(model->take_sums().nll), out.push_back(model->gradient_norm());
        model->update({5e-3, 0.9, 0.95, 1e-5, 0.1, 1, step});
        if (!visited) continue;
        model->randomise({});
        model->evaluate(row), model->evaluate_base(row), model->take_sums();
        model->gather_parameters();
        generate_once(*model, row.tokens, limits);
        model->generator().finish();
    }
    return out;
}

template <class Dev> void expect_modes_leave_nothing_behind(Dev dev, const std::vector<ModeCase> &cases) {
    for (const ModeCase &c : cases) EXPECT_EQ(losses_and_norms(dev, c, true), losses_and_norms(dev, c, false)) << c.name();
}
