#include "batch.h"

#include <filesystem>

#include "../core/common.h"
#include "../core/file.h"
#include "../io/safetensors.h"
#include "checkpoint.h"

using nlohmann::json;

static std::string answers_file(const std::string &dir, const std::string &name) { return dir + "/" + name + ".jsonl"; }
static std::string values_file(const std::string &dir, const std::string &name) { return dir + "/" + name + ".safetensors"; }

// The measured arrays by name.
template <class B> static auto measured(B &batch) {
    return std::map<std::string, decltype(&batch.values)>{{"old_logps", &batch.old_logps},
                                                          {"reference_logps", &batch.reference_logps},
                                                          {"teacher_logps", &batch.teacher_logps},
                                                          {"values", &batch.values}};
}

// Returns false if nothing was measured.
static bool write_values(const std::string &path, const Batch &batch) {
    std::vector<TensorSpec> specs;
    for (const auto &[name, of_tokens] : measured(batch))
        if (!of_tokens->empty()) specs.push_back({name, {batch.rollouts.total_targets()}, "F64"});
    if (specs.empty()) return false;
    HostMemory host;
    SafetensorsWriter writer(path, specs);
    for (const TensorSpec &spec : specs)
        for (const std::vector<double> &tokens : *measured(batch)[spec.name])
            writer.write_part(spec.name, tokens.data(), tokens.size(), host);
    writer.finish();
    return true;
}

static void read_values(const std::string &path, Batch &batch) {
    const SafetensorsFile file(path);
    for (const auto &[name, of_tokens] : measured(batch)) {
        if (!file.tensors().contains(name)) continue;
        const auto all = file.array<double>(name);
        auto next = all.begin();
        for (size_t i = 0; i < batch.rollouts.size(); i++) {
            const auto end = next + ptrdiff_t(batch.rollouts.targets(i));
            of_tokens->emplace_back(next, end);
            next = end;
        }
    }
}

json save_batch(const Batch &batch, const std::string &dir, const std::string &name, int64_t updates) {
    write_rollouts(answers_file(dir, name), batch.rollouts.all());
    json state = {{"file", fingerprint(InputFile(answers_file(dir, name)))},
                  {"begin", batch.begin},
                  {"age", updates - batch.written_at},
                  {"news", batch.log}};
    if (batch.is_measured && write_values(values_file(dir, name), batch))
        state["values"] = fingerprint(InputFile(values_file(dir, name)));
    return state;
}

Batch load_batch(const json &state, const std::string &dir, const std::string &name, size_t vocab) {
    const auto checked = [&](const std::string &file, const json &expected) {
        if (!std::filesystem::exists(file) || expected != fingerprint(InputFile(file)))
            die("%s is damaged%s", file.c_str(), other_checkpoint(dir).c_str());
        return file;
    };
    Batch batch{.rollouts = Rollouts(checked(answers_file(dir, name), state["file"]), vocab),
                .begin = state["begin"],
                .written_at = -state["age"].get<int64_t>(),
                .log = state["news"],
                .is_measured = state.contains("values")};
    if (batch.is_measured) read_values(checked(values_file(dir, name), state["values"]), batch);
    return batch;
}
