// The types and functions that all tasks of a run share.
#pragma once
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#include "../data/samples.h"
#include "../model/model.h"
#include "../parallel/comm.h"
#include "options.h"

// Creates models for the device and dtype of the options, with planned but not yet allocated memory.
using ModelFactory = std::function<std::unique_ptr<Model>(const ModelConfig &, const ModelLimits &)>;

struct Device {
    ModelFactory make_model;
    // Returns the memory of the run's models. Its name and size are known without a model. A plan for another device does not call this function.
    std::function<std::unique_ptr<Memory>()> make_memory;
};

// A model that is in memory together with the trained one.
struct CoResidentModel {
    const char *what;  // its name for messages
    ModelConfig config;
    Mode mode;
};

// The stream of notes and progress: in the task generate, standard output has the completions.
inline FILE *notes_stream(Task task) { return task == GENERATE ? stderr : stdout; }

// A model of a run: its configuration, the source of its weights and of its tokenizer, and its division among ranks.
struct ModelSpec {
    ModelConfig config = {};
    std::string dir = {};             // empty with --preset
    std::string adapter = {};         // the directory that config.lora is read from; empty if adapters are new
    std::string tokenizer_dir = {};   // the adapter's directory if it has a tokenizer, else dir
    std::string tokenizer_hash = {};  // the hash of dir's tokenizer; empty if there is none
    size_t grown_from = 0;            // rows of the vocabulary in dir, where config has more (use_tokenizer); else 0
    Ranks ranks = {};
    bool new_head = false;                           // the head of a reward model starts from random values if dir has none
    TeacherShape teacher = {};                       // of a student
    std::vector<CoResidentModel> co_residents = {};  // models allocated later; the plan of this model reserves their memory
};

struct Run {
    const char *program;  // its name, "train_llama"
    Task task;
    Options options;
    Comm &comm;
    size_t sharing;  // number of ranks that share the device's memory, including this one
    Device device;
    ModelSpec model = {};   // the task's model, on all ranks of the run
    ChatFormat chat = {};   // chat format of the training data
    size_t in_process = 1;  // number of ranks that are threads of this process, including this one
    std::shared_ptr<Mesh> mesh = nullptr;
    bool share_prompts = false;  // rows have the prompt of several answers once (../data/row.h)

    bool is_main_rank() const { return comm.rank == 0; }  // true on one rank, which prints and writes the files
    __attribute__((format(printf, 2, 3))) void say(const char *text, ...) const;  // prints a line on notes_stream()
};

template <class Sums> Sums over_ranks(Comm &comm, const Sums &own) {
    Sums all;
    for (const Sums &of_rank : comm.gather(own)) all += of_rank;
    return all;
}

// Writes a model directory's other files: config.json or adapter_config.json, generation_config.json, tokenizer and chat template.
void write_companions(const ModelSpec &model, const ChatFormat &chat, const std::string &dir,
                      const std::string &dtype);  // run.cpp

inline double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int train(Run &run);                                                                                 // trainer.cpp
int generate(Run &run);                                                                              // generate.cpp
double exact_match(const Run &run, const std::string &model_dir, const Samples &data, size_t show);  // generate.cpp: for the demo
