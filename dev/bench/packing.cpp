// The gain of packing in a whole training step: one sample of 2048 tokens and seven of 50, packed to one row of 2398 tokens, or padded
// to a batch of 8 rows of 2048.
//
//   ./packing [threads]
//
// A step is the trainer's step: clear gradients, forward, backward, gradient norm, AdamW. Padding tokens follow a sample and have no
// target, so the losses are equal. The head skips these tokens in both cases; a padded trainer would not.
#define LLMC_NO_MAIN
#include "../../train_llama.cu"

#include "bench.h"

using Documents = std::vector<std::vector<int32_t>>;

static ModelConfig small_model() {
    std::vector<std::string> notes;
    const nlohmann::json source = {
        {"model_type", "llama"},      {"vocab_size", 2048},       {"hidden_size", 192},       {"num_hidden_layers", 2},
        {"num_attention_heads", 3},   {"num_key_value_heads", 1}, {"intermediate_size", 512}, {"max_position_embeddings", 2048},
        {"tie_word_embeddings", true}};
    return parse_config(source, "the benchmark's model", notes);
}

// Returns a row for each sample, padded to `length` with tokens without a target.
static std::vector<Row> padded_rows(const Documents &samples, size_t length) {
    std::vector<Row> rows;
    for (std::vector<int32_t> tokens : samples) {
        std::vector<uint8_t> mask(tokens.size(), 1);
        tokens.resize(length), mask.resize(length);
        rows.push_back(make_row({tokens}, {mask}));
    }
    return rows;
}

static std::vector<Row> packed_row(const Documents &samples) {
    std::vector<std::vector<uint8_t>> masks;
    for (const auto &tokens : samples) masks.emplace_back(tokens.size(), 1);
    return {make_row(samples, masks)};
}

struct Case {
    const char *name;
    std::vector<Row> rows;
    double loss = 0;
};

template <class Dev> static void table(Dev dev, std::vector<Case> cases) {
    const ModelConfig config = small_model();
    ModelLimits limits;
    limits.row_tokens = 2432, limits.positions = 2048;  // 2398, padded to a multiple of row_multiple
    Llama<Dev> model(dev, config, limits);
    SelfComm comm;
    Mesh mesh(comm, 1);
    model.allocate(mesh, false, false);
    model.initialise(1);

    const auto loss_and_gradient = [&](Case &c) {
        size_t targets = 0;
        for (const Row &row : c.rows) targets += row.targets.size();
        model.zero_gradients();
        for (const Row &row : c.rows) model.accumulate(row, 1 / float(targets), true);
        return model.take_sums().nll / double(targets);
    };
    for (Case &c : cases) c.loss = loss_and_gradient(c);  // before the first update

    std::vector<Job> steps;
    for (Case &c : cases)
        steps.push_back([&] {
            loss_and_gradient(c);
            AdamW adamw{1e-4, 0.9, 0.95, 1e-8, 0.1, 1, 1};
            adamw.grad_scale = std::min(1.0, 1 / model.gradient_norm());
            model.update(adamw);
        });
    const auto t = fastest(8, steps);
    for (size_t i = 0; i < cases.size(); i++) {
        size_t tokens = 0;
        for (const Row &row : cases[i].rows) tokens += row.T;
        printf("%-5s %-24s %7zu %9.1f %9.2f %10.6f\n", dtype_name<typename Dev::X>, cases[i].name, tokens, t[i] * 1e3,
               t[i] / t[0], cases[i].loss);
    }
}

int main(int argc, char **argv) {
    const int threads = threads_argument(argc, argv);
    const ContextPtr ctx = make_context();
    heading("packing", threads);

    Documents samples;
    for (size_t length : {2048, 50, 50, 50, 50, 50, 50, 50}) {
        samples.emplace_back();
        for (size_t t = 0; t < length; t++) samples.back().push_back(int32_t((samples.size() * 131 + t * 7919) % 2048));
    }
    const std::vector<Case> cases = {{"the 2048 alone", packed_row({samples[0]})},
                                     {"2048 and 7 x 50, packed", packed_row(samples)},
                                     {"2048 and 7 x 50, padded", padded_rows(samples, 2048)}};
    printf("a training step of a Llama with 2 layers of 192, vocabulary 2048; x: times the 2048 alone\n");
    printf("dtype samples                   tokens   step, ms         x       loss\n");
    table(CpuF32{threads, ctx.get()}, cases);
    table(CpuBf16{threads, ctx.get()}, cases);
}
