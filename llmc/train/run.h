// What a trainer binary does apart from its model: the tasks pretrain, sft, dpo, rm, eval, generate, the demo and --plan.
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "../core/options.h"
#include "../io/hf.h"
#include "../parallel/comm.h"
#include "model.h"

// Makes a model of the device and dtype that the options ask for; its memory is planned, not yet allocated.
using ModelFactory = std::function<std::unique_ptr<Model>(const ModelConfig &, const ModelLimits &)>;

// Every rank calls it. `program`: "train_llama". `sharing`: ranks that take their memory from the same pool as this one, itself included. Returns the exit code.
int run_task(const char *program, const Parsed &parsed, Comm &comm, size_t sharing, const ModelFactory &make_model);

// ---- shared by the tasks --------------------------------------------------------------------------------------------------------------

struct Run {
    const char *program;  // its name
    Task task;
    Options options;
    Comm &comm;
    size_t sharing;  // see run_task
    ModelFactory make_model;
    std::string model_dir = {};  // empty with --preset
    ModelConfig config = {};
    std::string tokenizer_hash = {};  // of model_dir's tokenizer; empty if it has none
    Ranks ranks = {};
    size_t in_process = 1;  // ranks that are threads of this process, itself included
    std::shared_ptr<Mesh> mesh = nullptr;
    std::optional<ModelConfig> beside = {};  // --plan: of a reference that is in memory, too

    bool speaks() const { return comm.rank == 0; }  // one rank talks to people and writes what all have in common
    __attribute__((format(printf, 2, 3))) void say(const char *text, ...) const;  // a line on standard output
};

std::string program_file(const std::string &path);  // a file of the project, relative to the executable

// Cheap, and enough to notice another file: its size, and a hash of its first and last MiB.
std::string fingerprint(const InputFile &file);

// A prepared file for `path`: itself, or what data/prepare.py makes of raw data for that task, kept in a cache keyed by all that shapes
// it. All ranks call it, and one of them runs prepare.py. `extra`: further arguments for it.
std::string prepared_file(const Run &run, Task task, const std::string &path, const std::vector<std::string> &extra = {});

std::string cache_file(const std::string &name);  // where what was once computed is kept; its directory exists

void open_config(Run &run,
                 const std::string &dir);  // of the model in `dir`, with its tokenizer's hash; dies at one of another program
Ranks ranks_of(const Run &run, size_t world, size_t sp);  // as the flags say; dies where the heads of run.config do not suit them
void expect_positions(const Run &run,
                      const PreparedData &data);  // dies where a document has more tokens than run.config positions
std::unique_ptr<PreparedData> open_data(const Run &run, const std::string &path);
size_t rows_capacity(const PreparedData &data, size_t row_tokens);  // T of the largest row that this data can fill
ModelLimits limits_for(const Run &run, Mode mode, const PreparedData &data);
std::unique_ptr<Model> open_model(const Run &run,
                                  ModelLimits limits);  // chooses --recompute auto, allocates, loads or initialises

template <class Sums> Sums over_ranks(Comm &comm, const Sums &own) {
    Sums all;
    for (const Sums &of_rank : comm.gather(own)) all += of_rank;
    return all;
}
void share(Comm &comm, std::vector<double> &values);  // the sum over ranks, element by element, of as many as there may be

// What the model says of each document of these samples (Model::evaluate), [i] of document i; its take_sums() add up. The same on all ranks.
std::vector<double> document_values(const Run &run, Model &model, const PreparedData &data, std::span<const size_t> samples);

int train(Run &run);                                                                                // training.cpp
int generate(Run &run);                                                                             // generate.cpp
double exact_match(Run &run, const std::string &model_dir, const PreparedData &data, size_t show);  // generate.cpp: for the demo
