// What the tasks of a run share.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "../data/samples.h"
#include "../model/model.h"
#include "../parallel/comm.h"
#include "options.h"

// Makes a model for the device and dtype that the options ask for. Its memory is planned, but not yet allocated.
using ModelFactory = std::function<std::unique_ptr<Model>(const ModelConfig &, const ModelLimits &)>;

// A model in memory in addition to the trained one.
struct CoResidentModel {
    const char *what;  // for people
    ModelConfig config;
    Mode mode;
};

struct Run {
    const char *program;  // its name, "train_llama"
    Task task;
    Options options;
    Comm &comm;
    size_t sharing;  // number of ranks sharing this memory pool, including this one
    ModelFactory make_model;
    std::string model_dir = {};      // empty with --preset
    std::string tokenizer_dir = {};  // the same, or the directory of --adapter if that also has the tokenizer
    ModelConfig config = {};
    ChatFormat chat = {};             // of the data that is trained on
    bool new_head = false;            // a reward model whose head starts from random values if model_dir has none
    std::string tokenizer_hash = {};  // the hash of model_dir's tokenizer; empty if there is none
    Ranks ranks = {};
    size_t in_process = 1;  // the number of ranks, this one included, that are threads of this process
    std::shared_ptr<Mesh> mesh = nullptr;
    std::vector<CoResidentModel> co_residents = {};  // further models that will need memory

    bool is_main_rank() const { return comm.rank == 0; }  // is true of one rank, which prints and writes the files
    __attribute__((format(printf, 2, 3))) void say(const char *text, ...) const;  // a line on standard output
};

template <class Sums> Sums over_ranks(Comm &comm, const Sums &own) {
    Sums all;
    for (const Sums &of_rank : comm.gather(own)) all += of_rank;
    return all;
}

// Writes a model directory's other files: config.json or adapter_config.json, generation_config.json, tokenizer and chat template.
void write_companions(const Run &run, const ModelConfig &config, const std::string &dir, const std::string &dtype);  // run.cpp

int train(Run &run);                                                                           // trainer.cpp
int generate(Run &run);                                                                        // generate.cpp
double exact_match(Run &run, const std::string &model_dir, const Samples &data, size_t show);  // generate.cpp: for the demo
