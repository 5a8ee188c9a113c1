// The task merge: adds an adapter to the model's weights, W + scale * B A, and writes a new Hugging Face directory. With --load_in W is the quantised
// weight that the adapter was trained with; PEFT would quantise the sum again.
#include <set>

#include "../core/common.h"
#include "../io/hf.h"
#include "../model/lora.h"
#include "../model/parameters.h"
#include "../ops/quantise.h"
#include "../train/open_model.h"
#include "../train/output.h"
#include "tasks.h"

namespace {

// Adds scale * B A to rows [first, first + rows) of a module's weight, in float.
struct AdapterProduct {
    std::vector<float> a, b;  // (rank, IC), (OC, rank)
    size_t rank, IC;
    float scale;

    void add(float *w, size_t first, size_t rows) const {
#pragma omp parallel for
        for (size_t o = 0; o < rows; o++) {
            std::vector<float> sum(IC);
            for (size_t r = 0; r < rank; r++)
                for (size_t i = 0; i < IC; i++) sum[i] += b[(first + o) * rank + r] * a[r * IC + i];
            for (size_t i = 0; i < IC; i++) w[o * IC + i] += scale * sum[i];
        }
    }
};

// Returns the adapters, by the names of their weights.
std::map<std::string, AdapterProduct> read_products(const ModelSpec &model, const HfWeights &adapter) {
    const ModelConfig &config = model.config;
    std::map<std::string, AdapterProduct> products;
    HostMemory host;
    const size_t r = config.lora.rank;
    for (size_t l = 0; l < config.L; l++)
        for (const LinearModule &m : adapted_modules(config))
            for (size_t i = 0; has_module(config, l, m) && i < copies(config, m); i++) {
                const std::string name = layer_name(config, l) + copy_name(m, i) + ".";
                AdapterProduct p{std::vector<float>(r * m.IC), std::vector<float>(m.OC * r), r, m.IC, float(config.lora.scale())};
                expect_adapter_tensor(model, adapter, name + "lora_A.weight", {r, m.IC});
                expect_adapter_tensor(model, adapter, name + "lora_B.weight", {m.OC, r});
                adapter.read(name + "lora_A.weight", {r, m.IC}, p.a.data(), host);
                adapter.read(name + "lora_B.weight", {m.OC, r}, p.b.data(), host);
                products.emplace(name + "weight", std::move(p));
            }
    return products;
}

// Returns the names of the weights that --load_in quantises.
std::set<std::string> quantised_names(const ModelConfig &config, const Model &model) {
    std::set<std::string> names;
    for (const Tensor &t : model.frozen_tensors())
        if (config.weight_bits && t.of_layer) names.insert(t.name);
    return names;
}

}  // namespace

int merge(Run &run) {
    const Options &o = run.options;
    const ModelConfig &config = run.model.config;
    if (!run.is_main_rank()) return 0;
    OutputDirectory output(o.output_dir);
    for (const auto &[flag, path] : inputs_of(run)) output.refuse_input(flag, path);
    if (!o.overwrite && output.holds_run())
        die("%s already holds a run or a model\n  fix: use --overwrite to replace it, or give another --output_dir",
            o.output_dir.c_str());
    const HfWeights weights = weights_of(run.model), adapter(o.adapter, adapter_files);
    const auto model = run.device.make_model(config, {});
    expect_known_tensors(run, run.model, *model, weights), expect_known_adapter(run.model, *model, adapter);
    const auto products = read_products(run.model, adapter);
    const auto quantised = quantised_names(config, *model);
    std::vector<TensorSpec> specs;
    std::string type = "F32";  // dtype in config.json
    for (const Tensor &t : model->frozen_tensors()) {
        TensorSpec spec{t.name, t.shape, "F32"};
        if (t.transposed) std::swap(spec.shape[0], spec.shape[1]);
        const TensorInfo *stored = weights.find(t.name);
        if (o.export_dtype == Dtype::bf16 || (!o.export_dtype && stored && stored->dtype == "BF16")) spec.dtype = "BF16";
        if (stored) type = spec.dtype;
        specs.push_back(spec);
    }
    output.remove_leftovers();
    output.claim({std::string(model_name) + "/"});
    SelfComm alone;
    write_directory(alone, o.output_dir + "/" + model_name, [&](const std::string &dir) {
        HfWriter writer(dir, specs);
        HostMemory host;
        for (const TensorSpec &spec : specs) {
            const HfWeights &from = adapter.find(spec.name) ? adapter : weights;  // modules trained in full
            const auto product = products.find(spec.name);
            const size_t columns = spec.shape.empty() ? 1 : elements(spec.shape) / spec.shape[0],
                         rows = spec.shape.empty() ? 1 : spec.shape[0];
            const bool rounds = quantised.contains(spec.name), adds = product != products.end();
            // GPT-2's files store matrices as (in, out).
            const bool turns = config.gpt2() && (rounds || adds), whole = rounds || turns;  // blocks may cross rows
            const size_t OC = turns ? columns : rows, IC = turns ? rows : columns;
            in_parts(
                rows,
                [&](size_t first, size_t n) {
                    std::vector<float> values(n * columns);
                    from.read_part(spec.name, spec.shape, first * columns, values.size(), values.data(), host);
                    if (turns) values = transposed(values, IC, OC, 0, values.size());
                    if (rounds) values = values_of(config.weight_bits, quantise(config.weight_bits, values, IC), OC, IC);
                    if (adds) product->second.add(values.data(), first, turns ? OC : n);
                    if (turns) values = transposed(values, OC, IC, 0, values.size());
                    writer.write(spec.name, values.data(), values.size(), host);
                },
                whole ? rows : std::max<size_t>(1, (size_t(1) << 22) / columns));
        }
        writer.finish();
        ModelSpec merged = run.model;
        merged.config.lora = {};
        write_companions(merged, run.chat, dir, type);
    });
    const auto names = output.model_in(model_name);
    output.expect_free(names);
    output.clear(std::string(model_name) + "/");
    output.publish_model();
    run.say("saved %s: %zu weights of %s with the adapter %s added", o.output_dir.c_str(), products.size(), run.model.dir.c_str(),
            o.adapter.c_str());
    return 0;
}
