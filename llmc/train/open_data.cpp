#include "open_data.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "../core/common.h"
#include "../core/file.h"
#include "../data/prepare.h"
#include "open_config.h"
#include "rollouts.h"

namespace fs = std::filesystem;

void expect_same(const Run &run, const std::string &path, const std::string &own) {
    const auto all = run.comm.gather(own);
    agree(run.comm, [&] {
        for (size_t r = 1; r < all.size(); r++)
            if (all[r] != all[0])
                die("%s is not the same file for rank 0 and for rank %zu\n  fix: copy the same files to all hosts", path.c_str(),
                    r);
    });
}

void expect_same_files(const Run &run, const std::vector<std::string> &paths) {
    if (run.comm.size == 1) return;
    const std::string process = format("%s %d", host_name().c_str(), int(getpid()));
    const auto processes = run.comm.gather(process);
    const size_t first = size_t(std::find(processes.begin(), processes.end(), process) - processes.begin());
    for (const std::string &path : paths) {
        std::string own;
        agree(run.comm, [&] {
            if (first == size_t(run.comm.rank)) own = fs::exists(path) ? fingerprint(InputFile(path)) : "none";
        });
        const auto all = run.comm.gather(own);
        expect_same(run, path, all[first]);
    }
}

// Returns the kind of data that dpo and rm learn from.
static std::string preference_kind(const Run &run) { return learns_unpaired(run.options) ? "unpaired" : "pref"; }

std::string prepared_file(const Run &run, Task task, const std::string &flag, const std::string &path,
                          const std::vector<std::string> &extra) {
    const std::string kind = task == PRETRAIN                                               ? "pretrain"
                             : task == GENERATE                                             ? "prompts"
                             : task & PAIRS                                                 ? preference_kind(run)
                             : task & RL || (task == DISTILL && run.options.on_policy == 1) ? "rl"
                                                                                            : "sft";
    const TokenMeaning meaning{run.model.tokenizer_dir, run.model.tokenizer_hash, run.model.config.V, run.model.config.eos};
    std::string out = while_others_wait(run, run.is_main_rank(), [&] { return prepare(meaning, kind, flag, path, extra); });
    return run.comm.gather(out)[0];
}

void expect_positions(const Run &run, const ModelSpec &model, const Samples &data) {
    const size_t most = model.config.max_positions;
    size_t first = data.documents(), longest = 0;
    for (size_t i = 0; i < data.documents(); i++) {
        longest = std::max(longest, data.length(i));
        if (data.length(i) > most) first = std::min(first, i);
    }
    if (first < data.documents())
        die("document %zu of %s has %zu tokens but %s of %s is %zu\n  fix: prepare with --max_len %zu%s", first,
            data.name().c_str(), data.length(first), model.config.positions_name(),
            (model.dir.empty() ? run.options.preset : model.dir).c_str(), most, most,
            model.config.gpt2()
                ? ""
                : format(", or --rope_scaling '{\"rope_type\": \"yarn\", \"factor\": %zu}'", ceil_div(longest, most)).c_str());
}

std::unique_ptr<PreparedData> open_data(const Run &run, const std::string &path) {
    std::unique_ptr<PreparedData> data;
    agree(run.comm, [&] {
        data = std::make_unique<PreparedData>(path, run.model.config.V, run.model.tokenizer_hash);
        const bool unpaired = learns_unpaired(run.options);
        if (run.task & PAIRS && data->kind() != preference_kind(run))
            die("%s is of kind %s, but %s trains on %s\n  fix: prepare %s with data/prepare.py %s", path.c_str(),
                data->kind().c_str(), unpaired ? ("--loss_type " + run.options.loss_type[0]).c_str() : task_name(run.task),
                unpaired ? "single answers with a label" : "pairs", unpaired ? "them" : "pairs", preference_kind(run).c_str());
        if (run.task & (PRETRAIN | SFT | DISTILL | RL) && (data->pairs() || data->judged()))
            die("%s is of kind %s, but %s trains on single documents\n  fix: use the task %s, or other data", path.c_str(),
                data->kind().c_str(), task_name(run.task), data->judged() ? "dpo with --loss_type kto" : "dpo or rm");
        expect_positions(run, run.model, *data);
    });
    expect_same(run, path, data->fingerprint());
    return data;
}

std::unique_ptr<Samples> open_samples(const Run &run, const std::string &path) {
    if (run.options.rollouts.empty()) return open_data(run, path);
    expect_same_files(run, {path});
    std::unique_ptr<Rollouts> rollouts;
    agree(run.comm, [&] {
        rollouts = std::make_unique<Rollouts>(path, run.model.config.V);
        expect_positions(run, run.model, *rollouts);
    });
    return rollouts;
}
