// The part of a trainer that does not depend on its model: the tasks pretrain, sft, dpo, rm, eval, generate, the demo and --plan.
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "../core/options.h"
#include "../io/hf.h"
#include "../parallel/comm.h"
#include "model.h"

// Makes a model for the device and dtype that the options ask for. Its memory is planned, but not yet allocated.
using ModelFactory = std::function<std::unique_ptr<Model>(const ModelConfig &, const ModelLimits &)>;

// Runs a task and returns the exit code. Every rank calls it. `program` is "train_llama"; `sharing` counts the ranks,
// this one included, that take their memory from the same pool.
int run_task(const char *program, const Parsed &parsed, Comm &comm, size_t sharing, const ModelFactory &make_model);

// ---- shared by the tasks --------------------------------------------------------------------------------------------------------------

struct Run {
    const char *program;  // its name, "train_llama"
    Task task;
    Options options;
    Comm &comm;
    size_t sharing;  // see run_task
    ModelFactory make_model;
    std::string model_dir = {};  // empty with --preset
    ModelConfig config = {};
    std::string tokenizer_hash = {};  // the hash of model_dir's tokenizer; empty if there is none
    Ranks ranks = {};
    size_t in_process = 1;  // the number of ranks, this one included, that are threads of this process
    std::shared_ptr<Mesh> mesh = nullptr;
    std::optional<ModelConfig> beside = {};  // --plan: the configuration of a reference model that is in memory, too

    bool speaks() const { return comm.rank == 0; }  // is true of one rank, which prints and writes the files
    __attribute__((format(printf, 2, 3))) void say(const char *text, ...) const;  // a line on standard output
};

std::string program_file(const std::string &path);  // a file of the project, relative to the executable

// Returns a file's size and a hash of its first and last MiB: cheap, and enough to notice a different file.
std::string fingerprint(const InputFile &file);

// Returns a prepared file for `path`: the file itself, or for raw data the file that data/prepare.py makes for that task. Such files are kept in a
// cache, keyed by everything that shapes them. All ranks call it, and one of them runs prepare.py, with `extra` as further arguments.
std::string prepared_file(const Run &run, Task task, const std::string &path, const std::vector<std::string> &extra = {});

std::string cache_file(const std::string &name);  // the path of a file of the cache, whose directory exists

void open_config(
    Run &run,
    const std::string &dir);  // of the model in `dir`, with its tokenizer's hash; dies if the model is for another program
Ranks ranks_of(const Run &run, size_t world, size_t sp);  // as the flags say; dies if the heads of run.config do not suit them
void expect_positions(const Run &run,
                      const PreparedData &data);  // dies if a document has more tokens than run.config has positions
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
void share(Comm &comm, std::vector<double> &values);  // replaces each element by its sum over ranks; the vector may be long

// Evaluates the documents of these samples. Returns [i] = the value of document i (Model::evaluate), the same on all ranks. Adds to take_sums().
std::vector<double> document_values(const Run &run, Model &model, const PreparedData &data, std::span<const size_t> samples);

int train(Run &run);                                                                                // training.cpp
int generate(Run &run);                                                                             // generate.cpp
double exact_match(Run &run, const std::string &model_dir, const PreparedData &data, size_t show);  // generate.cpp: for the demo
