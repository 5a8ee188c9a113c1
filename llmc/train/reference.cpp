#include "reference.h"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <set>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/hash.h"
#include "../data/tokenizer.h"
#include "evaluate.h"
#include "open_config.h"
#include "open_data.h"
#include "open_model.h"

namespace fs = std::filesystem;

bool reference_is_base(const Run &run) {
    return run.model.config.lora.rank > 0 && run.options.adapter.empty() && run.options.ref_model.empty();
}

ModelSpec reference_spec(const Run &run) {
    const std::string &dir = run.options.ref_model;
    ModelSpec out = spec_beside(run, dir, "--ref_model");
    agree(run.comm, [&] {
        if (out.config.reward) die("--ref_model %s is a reward model\n  fix: use a language model", dir.c_str());
    });
    return out;
}

std::unique_ptr<Model> open_frozen(const Run &run, const ModelSpec &model, const ModelLimits &limits) {
    return open_model(run, model, co_resident_limits(limits, model.config, Mode::evaluate));
}

// True if a second model is in memory while the first one is trained.
static bool is_resident(const Run &run) {
    const RefMode usual = estimates_kl(run.options) ? RefMode::resident : RefMode::precompute;
    return !reference_is_base(run) && run.options.ref_mode.value_or(usual) == RefMode::resident;
}

std::vector<CoResidentModel> Reference::co_residents(const Run &run) {
    if (!is_resident(run)) return {};
    return {{"the reference model, resident", reference_spec(run).config, Mode::evaluate}};
}

Reference::Reference(const Run &run, const ModelLimits &limits) : run_(run), spec_(reference_spec(run)), limits_(limits) {
    if (is_resident(run)) model_ = open_frozen(run, spec_, limits_);
}

void Reference::use(const Samples &data, size_t samples) {
    if (reference_is_base(run_)) return;
    agree(run_.comm, [&] { expect_positions(run_, spec_, data); });
    if (!model_) precomputed_[&data] = precompute(data, samples);
}

std::vector<double> Reference::logps(Model &trained, const Samples &data, const Row &row) {
    std::vector<double> out;
    if (!model_ && !reference_is_base(run_)) {
        const auto &all = precomputed_.at(&data);
        for (size_t document : row.documents) out.push_back(all[document]);
        return out;
    }
    out = model_ ? evaluate_documents(spec_.config, *model_, row) : document_sums(row, trained.evaluate_base(row));
    for (double &value : out) value = -value;
    return out;
}

// ---- --ref_mode precompute ----------------------------------------------------------------------------------------------------------

// Returns all inputs of the numbers as text, for the hash. max_len and the template have already shaped the data.
std::string Reference::side_file(const Samples &data, size_t documents) const {
    std::set<std::string> files = {spec_.dir + "/config.json"};
    for (const auto &entry : fs::directory_iterator(spec_.dir))
        if (entry.path().extension() == ".safetensors") files.insert(entry.path().string());
    if (spec_.config.lora.rank)  // from --adapter
        for (const char *name : {"/adapter_config.json", "/adapter_model.safetensors"}) files.insert(spec_.adapter + name);
    std::string key = format("reference 5 %s%s %zu %s", name_of(run_.options.dtype).c_str(),
                             name_of(run_.options.load_in).c_str(), documents, data.fingerprint().c_str());
    for (const std::string &file : files) key += format(" %s", fingerprint(InputFile(file)).c_str());
    return cache_file(format("reference-%s.safetensors", hash_of(key).c_str()));
}

static const char *const side_array = "logps";

static void write_side_file(const std::string &path, const std::vector<double> &values) {
    HostMemory host;
    SafetensorsWriter writer(path, {{side_array, {values.size()}, "F64"}},
                             {{"kind", "log-probabilities of documents by a reference model"}});
    writer.write(side_array, values.data(), host);
    writer.finish();
}

// Returns nothing if the file does not exist or is damaged; it is then written again.
static std::vector<double> read_side_file(const std::string &path, size_t documents) {
    if (!fs::exists(path)) return {};
    try {
        const SafetensorsFile file(path);
        file.expect_shape(side_array, {documents});
        return file.array<double>(side_array);
    } catch (const Error &) {
        return {};
    }
}

std::vector<double> Reference::precompute(const Samples &data, size_t samples) const {
    std::string path;
    bool known = false;
    const size_t documents = data.first(samples);
    const char *const noun = data.pairs() ? "pairs" : "answers";
    std::vector<double> values(documents);
    agree(run_.comm, [&] {
        if (!run_.is_main_rank()) return;
        path = side_file(data, documents);
        const std::vector<double> read = read_side_file(path, documents);
        known = !read.empty();
        if (known) values = read;
    });
    known = run_.comm.max(known) > 0;
    if (known) {
        share(run_.comm, values);  // sends rank 0's values to all ranks
        run_.say("reference: %zu %s, read from %s", samples, noun, path.c_str());
        return values;
    }
    const auto start = std::chrono::steady_clock::now();
    {
        const auto model = open_frozen(run_, spec_, limits_);
        values = document_values(run_, spec_, *model, data, first_samples(samples));
        values.resize(documents);
    }
    for (double &value : values) value = -value;
    agree(run_.comm, [&] {
        for (size_t i = 0; i < documents; i++)
            if (!std::isfinite(values[i]))
                die("log p of document %zu of %s by the reference %s is not finite\n  fix: look for NaN in its weights", i,
                    data.name().c_str(), spec_.dir.c_str());
        if (run_.is_main_rank()) write_side_file(path, values);
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    run_.say("reference: %zu %s in %.1f s, kept in %s", samples, noun, seconds, path.c_str());
    return values;
}
