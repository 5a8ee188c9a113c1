#include "run.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <sstream>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/gpu.h"
#include "../core/hash.h"
#include "../core/rng.h"
#include "../data/packing.h"
#include "../data/tokenizer.h"
#include "../parallel/mesh.h"
#include "continuation.h"
#include "logger.h"
#include "pairs.h"

namespace fs = std::filesystem;

void Run::say(const char *text, ...) const {
    if (!speaks()) return;
    va_list args;
    va_start(args, text);
    printf("%s\n", vformat(text, args).c_str());
    va_end(args);
    fflush(stdout);
}

// ---- files around the program -------------------------------------------------------------------------------------------------------

std::string program_file(const std::string &path) { return (fs::read_symlink("/proc/self/exe").parent_path() / path).string(); }

// The project's own Python environment if `make deps` made one, else whatever python3 is.
static std::string python() {
    const std::string own = program_file(".venv/bin/python3");
    return fs::exists(own) ? own : "python3";
}

static void run_prepare(const std::vector<std::string> &arguments) {
    std::vector<std::string> command = {python(), program_file("data/prepare.py")};
    command.insert(command.end(), arguments.begin(), arguments.end());
    std::vector<char *> argv;
    for (std::string &a : command) argv.push_back(a.data());
    argv.push_back(nullptr);
    fflush(stdout);
    int errors[2];
    const pid_t child = pipe2(errors, O_CLOEXEC) == 0 ? fork() : -1;
    if (child < 0) die("cannot start %s: %s", command[0].c_str(), strerror(errno));
    if (child == 0) {
        dup2(STDERR_FILENO, STDOUT_FILENO);  // its table is for people, but our standard output may be read by a program
        dup2(errors[1], STDERR_FILENO);      // its error message is passed on
        execvp(argv[0], argv.data());
        _exit(127);
    }
    close(errors[1]);
    std::string message;
    char buffer[4096];
    for (ssize_t n; (n = read(errors[0], buffer, sizeof(buffer))) != 0;)
        if (n > 0) message.append(buffer, size_t(n));
        else if (errno != EINTR) break;
    close(errors[0]);
    while (!message.empty() && message.back() == '\n') message.pop_back();
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        if (!message.empty()) fprintf(stderr, "%s\n", message.c_str());
        return;
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        die("raw data needs Python, and %s is not there\n  fix: make deps, or give --data a prepared .safetensors file",
            command[0].c_str());
    if (message.empty()) die("data/prepare.py ended with status %d and no message", status);
    die("%s", message.c_str());
}

static std::vector<std::string> names_in(const std::string &list) {
    std::vector<std::string> names;
    std::istringstream in(list);
    for (std::string name; std::getline(in, name, ',');) names.push_back(name);
    return names;
}

static bool token_shards(const std::string &list) {
    const auto names = names_in(list);
    return !names.empty() &&
           std::all_of(names.begin(), names.end(), [](const std::string &name) { return name.ends_with(".bin"); });
}

// Returns everything that the prepared file depends on, as text.
static std::string preparation_key(const std::string &path, const std::vector<std::string> &arguments,
                                   const std::string &tokenizer_hash) {
    std::string key = tokenizer_hash;
    for (const std::string &a : arguments) key += "\n" + a;
    std::error_code none;
    std::set<std::string> files;
    for (const auto &entry : fs::directory_iterator(program_file("data")))
        if (entry.path().extension() == ".py") files.insert(entry.path());
    for (const std::string &name : names_in(path)) {
        files.insert(name);
        glob_t found{};
        if (glob(name.c_str(), 0, nullptr, &found) == 0) files.insert(found.gl_pathv, found.gl_pathv + found.gl_pathc);
        globfree(&found);
    }
    for (const std::string &file : files)
        if (fs::exists(file, none))
            key += format("\n%s %zu %lld", fs::canonical(file).c_str(), size_t(fs::file_size(file, none)),
                          (long long)fs::last_write_time(file).time_since_epoch().count());
    return key;
}

std::string fingerprint(const InputFile &file) {
    const size_t part = std::min<size_t>(file.size(), 1 << 20);
    std::string bytes(2 * part, '\0');
    file.read(bytes.data(), part, 0);
    file.read(bytes.data() + part, part, file.size() - part);
    return format("%zu-%s", file.size(), hash_of(bytes).c_str());
}

// Every rank reads its own host's file. Either all ranks have the same file, or none has one.
static void expect_same_file(const Run &run, const std::string &path, bool optional) {
    std::string own;
    agree(run.comm, [&] { own = optional && !fs::exists(path) ? "" : fingerprint(InputFile(path)); });
    const auto all = run.comm.gather(own);
    agree(run.comm, [&] {
        for (size_t r = 1; r < all.size(); r++)
            if (all[r] != all[0])
                die("%s is not the same file for rank 0 and for rank %zu\n  fix: the same files on all hosts", path.c_str(), r);
    });
}

std::string cache_file(const std::string &name) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const std::string dir = cache && *cache ? std::string(cache) + "/train_llama"
                                            : std::string(home && *home ? home : "/tmp") + "/.cache/train_llama";
    std::error_code error;
    fs::create_directories(dir, error);
    if (error) die("cannot create the cache %s: %s\n  fix: set XDG_CACHE_HOME", dir.c_str(), error.message().c_str());
    return dir + "/" + name;
}

// Returns what gives ids their meaning: a tokenizer, or two numbers for shards, which already hold ids.
static std::vector<std::string> vocabulary_flags(const Run &run, const std::string &kind, const std::string &path) {
    if (!run.tokenizer_hash.empty()) return {"--tokenizer", run.model_dir};
    if (kind == "pretrain" && token_shards(path) && !run.config.eos.empty())
        return {"--eos_token_id", std::to_string(run.config.eos[0]), "--vocab_size", std::to_string(run.config.V)};
    die("%s is raw data, which needs a tokenizer, but %s has no tokenizer.json\n"
        "  fix: --model DIR with a tokenizer, a prepared .safetensors file, or, to pretrain or evaluate, token shards (.bin) and a model with eos_token_id",
        path.empty() ? "the prompt" : path.c_str(), run.model_dir.empty() ? "a --preset" : run.model_dir.c_str());
}

static std::string prepare(const Run &run, const std::string &kind, const std::string &path,
                           const std::vector<std::string> &extra) {
    const std::string extension = fs::path(path).extension();  // without one it may be a hub name, OWNER/NAME
    if ((extension == ".jsonl" || extension == ".json" || extension == ".csv" || extension == ".parquet" ||
         extension == ".bin") &&
        path.find_first_of(",*") == path.npos && !fs::exists(path))
        die("no such file: %s\n  fix: --data FILE, prepared (.safetensors) or raw (.jsonl, .csv, .parquet, .bin)", path.c_str());
    if (path.ends_with(".safetensors")) return path;
    std::vector<std::string> arguments = vocabulary_flags(run, kind, path);
    arguments.insert(arguments.begin(), kind);
    if (!path.empty()) arguments.insert(arguments.end(), {"--input", path});
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    const std::string key = preparation_key(path, arguments, run.tokenizer_hash);
    const std::string out = cache_file(format("%s.safetensors", hash_of(key).c_str()));
    if (fs::exists(out)) return out;
    arguments.insert(arguments.end(), {"--out", out});
    run_prepare(arguments);
    return out;
}

std::string prepared_file(const Run &run, Task task, const std::string &path, const std::vector<std::string> &extra) {
    const std::string kind = task == PRETRAIN ? "pretrain" : task == GENERATE ? "prompts" : task & PAIRS ? "pref" : "sft";
    std::string out;
    std::future<std::string> made;  // preparing may take longer than --comm_timeout, so the other ranks are told that it goes on
    if (run.speaks()) made = std::async(std::launch::async, prepare, std::cref(run), kind, path, extra);
    const std::chrono::duration<double> patience(std::min(1.0, run.options.comm_timeout / 4));
    while (!run.comm.all(!run.speaks() || made.wait_for(patience) == std::future_status::ready)) {}
    agree(run.comm, [&] {
        if (run.speaks()) out = made.get();
    });
    out = run.comm.gather(out)[0];
    expect_same_file(run, out, false);
    return out;
}

// ---- opening model and data -----------------------------------------------------------------------------------------------------------

static void expect_own_family(const Run &run, const std::string &name) {
    const std::string trainer = run.config.gpt2() ? "train_gpt2" : "train_llama";
    if (trainer != run.program)
        die("%s is a %s model, which %s does not train\n  fix: ./%s", name.c_str(), run.config.family.c_str(), run.program,
            trainer.c_str());
}

void open_config(Run &run, const std::string &dir) {
    std::vector<std::string> notes;
    run.model_dir = dir;
    run.config = read_config(dir, notes);
    expect_own_family(run, dir);
    for (const std::string &note : notes) run.say("note: %s", note.c_str());
    const std::string tokenizer = dir + "/tokenizer.json";
    run.tokenizer_hash = fs::exists(tokenizer) ? tokenizer_hash(tokenizer) : "";
}

// Returns the configuration to train or to use.
static void open_model_config(Run &run) {
    const Options &o = run.options;
    if (!o.preset.empty()) run.config = preset(o.preset), expect_own_family(run, "--preset " + o.preset);
    else open_config(run, run.task == DEMO ? program_file("data/demo/model") : o.model);
    if (run.config.reward && run.task != RM && run.task != EVAL)
        die("%s is a reward model, which has no head for %s\n  fix: a language model; or the task rm or eval",
            run.model_dir.c_str(), task_name(run.task));
    if (run.task == RM && !run.config.reward) make_reward(run.config);
}

// `sp` of them in a ring.
Ranks ranks_of(const Run &run, size_t world, size_t sp) {
    const Options &o = run.options;
    check_ring_size(int(sp), int(world));
    Ranks r;
    r.world = world, r.rank = size_t(run.comm.rank), r.sp = sp;
    r.sp_mode = o.sp_mode == "ring" ? SpMode::ring : o.sp_mode == "gather" ? SpMode::gather : SpMode::ulysses;
    r.head_stride = o.ring_attn_head_stride ? o.ring_attn_head_stride : run.config.KV;
    r.zero_stage = int(o.zero_stage);
    r.flops = o.attention_tflops * 1e12, r.bandwidth = o.link_gb_s * 1e9;
    check_sp_mode(r.sp_mode, r.sp, run.config.H, run.config.KV, r.head_stride);
    return r;
}

void expect_positions(const Run &run, const PreparedData &data) {
    const size_t most = run.config.max_positions;
    for (size_t i = 0; i < data.documents(); i++)
        if (data.length(i) > most)
            die("document %zu of %s has %zu tokens but %s of %s is %zu\n  fix: prepare with --max_len %zu%s", i,
                data.path().c_str(), data.length(i), run.config.positions_name(),
                (run.model_dir.empty() ? run.options.preset : run.model_dir).c_str(), most, most,
                run.config.gpt2() ? "" : ", or rope scaling in config.json");
}

std::unique_ptr<PreparedData> open_data(const Run &run, const std::string &path) {
    auto data = std::make_unique<PreparedData>(path, run.config.V, run.tokenizer_hash);
    if ((run.task & (PRETRAIN | SFT | PAIRS)) && data->pairs() != ((run.task & PAIRS) != 0))
        die("%s is of kind %s, but %s trains on %s\n  fix: %s", path.c_str(), data->kind().c_str(), task_name(run.task),
            run.task & PAIRS ? "pairs" : "single documents",
            run.task & PAIRS ? "prepare pairs with data/prepare.py pref" : "the task dpo or rm, or other data");
    expect_positions(run, *data);
    return data;
}

size_t rows_capacity(const PreparedData &data, size_t row_tokens) {
    return round_up(std::min(row_tokens, data.total_tokens()), row_multiple);
}

ModelLimits limits_for(const Run &run, Mode mode, const PreparedData &data) {
    if (data.total_targets() == 0 && !run.config.reward)
        die("%s holds prompts, and nothing in it is a target\n  fix: prepare it again with data/prepare.py %s",
            data.path().c_str(), run.task == PRETRAIN ? "pretrain" : "sft");
    size_t longest = 0;
    for (size_t i = 0; i < data.documents(); i++) longest = std::max(longest, data.length(i));
    ModelLimits limits;
    limits.mode = mode;
    limits.row_tokens = rows_capacity(data, run.options.row_tokens);
    limits.positions = std::max(longest, row_multiple);
    return limits;
}

static const std::pair<const char *, Recompute> recompute_levels[] = {
    {"none", Recompute::none}, {"cheap", Recompute::cheap}, {"layer", Recompute::layer}};

// Returns the bytes that a rank with this model needs: those of its plan, and of a reference model's beside it.
static size_t rank_bytes(const Run &run, Model &model, ModelLimits limits) {
    if (!run.beside) return model.plan().bytes();
    limits.mode = Mode::evaluate;
    const auto reference = run.make_model(*run.beside, limits);
    reference->plan().place(run.options.guard);
    return model.plan().bytes() + reference->plan().bytes();
}

// Returns a model whose plan is placed. --recompute auto takes the first level whose plan fits into `memory` bytes, or else the last.
static std::unique_ptr<Model> plan_model(const Run &run, const std::string &recompute, ModelLimits &limits, size_t memory) {
    std::unique_ptr<Model> model;
    for (auto [name, level] : recompute_levels) {
        if (recompute != "auto" && recompute != name) continue;
        limits.recompute = level, limits.bf16_moments = run.options.moments == "bf16";
        model = run.make_model(run.config, limits);
        model->plan().place(run.options.guard);
        if (rank_bytes(run, *model, limits) <= memory || limits.mode != Mode::train) break;
    }
    return model;
}

// Returns the most tokens up to `limit`, in one row and in one sample, whose plan fits into `memory` bytes of a rank, or 0 if not even the
// shortest row fits. The ranks of a ring share the row.
static size_t most_tokens(const Run &run, const std::string &recompute, ModelLimits limits, size_t memory, size_t limit) {
    const size_t unit = row_multiple * limits.ranks.sp;
    size_t low = 0, high = ceil_div(limit, unit) + 1;  // in units: low fits, high does not
    while (low + 1 < high) {
        const size_t middle = (low + high) / 2;
        limits.row_tokens = limits.positions = middle * unit;
        const auto model = plan_model(run, recompute, limits, memory);
        (rank_bytes(run, *model, limits) <= memory ? low : high) = middle;
    }
    return std::min(low * unit, limit);
}

static size_t documents_of_sample(const Run &run) { return run.task & PAIRS ? 2 : 1; }

// Returns the same as a value of --max_len, where a row has room for one sample.
static size_t longest_sample(const Run &run, const std::string &recompute, const ModelLimits &limits, size_t memory,
                             size_t limit) {
    const size_t documents = documents_of_sample(run);
    return most_tokens(run, recompute, limits, memory, std::min<size_t>(documents * limit, INT32_MAX)) / documents;
}

// Returns the smallest ring, of more ranks than now, with which the plan fits, or 0 if there is none.
static size_t larger_ring(const Run &run, ModelLimits limits, size_t memory) {
    Ranks &r = limits.ranks;
    for (r.sp++; r.sp <= r.world; r.sp++) {
        if (r.world % r.sp || (r.sp_mode == SpMode::ulysses && run.config.H % r.sp)) continue;
        if (plan_model(run, run.options.recompute, limits, memory)->plan().bytes() <= memory) return r.sp;
    }
    return 0;
}

// Dies because the plan is larger than the memory, and says what to change, and by how much.
[[noreturn]] static void does_not_fit(const Run &run, const ModelLimits &limits, Model &model, size_t memory) {
    const std::string cause =
        format("the plan needs %s but only %s of memory are free (%s)", human_bytes(model.plan().bytes()).c_str(),
               human_bytes(memory).c_str(), model.memory().device().c_str());
    const std::string smaller = run.options.dtype == "f32" ? "--dtype bf16, or a smaller model" : "a smaller model";
    const bool keeps_too_much = run.options.recompute != "auto" && run.options.recompute != "layer";
    const size_t documents = documents_of_sample(run),
                 fits = limits.mode == Mode::generate
                            ? 0
                            : most_tokens(run, run.options.recompute, limits, memory, documents * run.config.max_positions);
    const size_t ring = larger_ring(run, limits, memory);
    const std::string wider = ring ? format("--ring_attn_size %zu (now %zu), ", ring, limits.ranks.sp) : "";
    if (fits == 0)
        die("%s\n  fix: %s%s%s; see --plan", cause.c_str(), wider.c_str(), keeps_too_much ? "--recompute layer, " : "",
            smaller.c_str());
    die("%s\n  fix: %s--row_tokens %zu (now %zu)%s%s, %s; see --plan", cause.c_str(), wider.c_str(), fits, limits.row_tokens,
        fits < documents * limits.positions ? format(" with samples of at most --max_len %zu", fits / documents).c_str() : "",
        keeps_too_much ? ", --recompute layer" : "", smaller.c_str());
}

// Returns the memory that a rank may take: the least that any rank has, measured before one of them takes any.
static size_t available_memory(const Run &run) {
    size_t least = 0;
    agree(run.comm, [&] { least = run.make_model(run.config, {})->memory().available() / run.sharing; });
    for (size_t other : run.comm.gather(least)) least = std::min(least, other);
    return least;
}

static void load_weights(const Run &run, Model &model) {
    const HfWeights weights(run.model_dir);
    std::vector<std::string> names;
    for (const Tensor &t : model.tensors()) names.push_back(t.name);
    if (run.config.tied || run.config.reward)
        names.push_back("lm_head.weight");  // is stored twice, or not used by a reward model
    weights.expect_only(names);
    if (run.config.reward && !weights.find("score.weight")) {
        if (run.task != RM)
            die("%s has no score.weight, the head of a reward model\n  fix: fetch the model again", run.model_dir.c_str());
        run.say("the reward head starts from random values: %s has none", run.model_dir.c_str());
    }
    model.load(weights, run.options.seed);
}

std::unique_ptr<Model> open_model(const Run &run, ModelLimits limits) {
    if (limits.mode != Mode::generate) limits.ranks = run.ranks;
    const bool trained = !run.model_dir.empty() && HfWeights::present(run.model_dir);
    const size_t memory = available_memory(run);
    std::unique_ptr<Model> model;
    agree(run.comm, [&] {
        if (!trained && limits.mode != Mode::train)
            die("%s has no weights (model.safetensors, or shards with an index)\n  fix: the directory of a trained model",
                run.model_dir.c_str());
        model = plan_model(run, run.options.recompute, limits, memory / 20 * 19);
        if (model->plan().bytes() > memory) does_not_fit(run, limits, *model, memory);
        if (run.options.profile) model->profile();
        model->allocate(*run.mesh, run.options.guard, run.options.poison);
        if (trained) load_weights(run, *model);
    });
    if (!trained) model->initialise(run.options.seed);
    return model;
}

// ---- --plan ---------------------------------------------------------------------------------------------------------------------------

// The memory that a plan is for: a named GPU for each rank, or the free memory of this machine.
struct Room {
    bool here;
    size_t usable, process;  // process: the bytes that the process itself takes

    explicit Room(const Run &run) : here(run.options.gpu.empty()) {
        const auto model = here ? run.make_model(run.config, {}) : nullptr;
        usable = here ? model->memory().available() : gpu_memory(run.options.gpu);
        process = here ? model->memory().process() : 0;
    }
};

static int print_plan(const Run &run, const std::optional<Continuation> &continuation) {
    const Options &o = run.options;
    ModelLimits limits;
    limits.ranks = run.ranks;
    limits.row_tokens = round_up(o.row_tokens, row_multiple);
    limits.positions = o.max_len;
    if (continuation) continuation->use(limits);
    const Room room(run);
    const size_t ranks = room.here ? run.ranks.world : 1,
                 memory = room.usable / ranks;  // the ranks of this machine share its memory
    const auto model = plan_model(run, o.recompute, limits, memory);
    const size_t of_rank = rank_bytes(run, *model, limits), bytes = room.process + ranks * of_rank;
    if (run.ranks.world > 1) printf("%s; the plan is that of each rank\n", mesh_line(run.ranks).c_str());
    printf("%zu parameters; rows of %zu tokens, samples of up to %zu; recompute %s\n\n%s\n", parameter_count(run.config),
           o.row_tokens, o.max_len, recompute_levels[size_t(limits.recompute)].first, model->plan().table().c_str());
    const auto line = [](const std::string &what, size_t n) { printf("%-78s %12s\n", what.c_str(), human_bytes(n).c_str()); };
    if (run.beside) line("the reference model, beside it (--ref_mode resident)", of_rank - model->plan().bytes());
    if (ranks > 1) line(format("%zu ranks, which share the memory of this machine", ranks), ranks * of_rank);
    if (room.process) line("the process itself, with what its libraries generate", room.process);
    const std::string where = room.here             ? "here"
                              : run.ranks.world > 1 ? format("on each of %zu GPUs (%s)", run.ranks.world, o.gpu.c_str())
                                                    : "on " + o.gpu;
    printf("%s: %s of %s usable %s\n", bytes <= room.usable ? "fits" : "does not fit", human_bytes(bytes).c_str(),
           human_bytes(room.usable).c_str(), where.c_str());

    const std::string ring = run.ranks.sp > 1 ? format(", a row of %zu ranks", run.ranks.sp) : "";
    if (const size_t longest = longest_sample(run, o.recompute, limits, memory, run.config.max_positions)) {
        printf("longest sample that fits: %zu tokens%s%s\n", longest, ring.c_str(),
               longest == run.config.max_positions ? format(" (%s)", run.config.positions_name()).c_str() : "");
        return 0;
    }
    limits.row_tokens = limits.positions = row_multiple;
    const auto least = plan_model(run, o.recompute, limits, memory);
    printf("longest sample that fits: none; parameters and optimizer%s alone need %s\n",
           run.beside ? ", with the reference," : "", human_bytes(rank_bytes(run, *least, limits)).c_str());
    return 0;
}

// For --plan --fit: shows how long a sample may be on more ranks, if a row holds one sample and all ranks share it.
static int print_fit(const Run &run) {
    const Options &o = run.options;
    const Room room(run);
    const size_t memory = room.usable, most = o.ranks > 1 ? o.ranks : 8, max_positions = run.config.max_positions;
    printf("%zu parameters in %s, ZeRO stage %zu; %s for each rank, %s\n", parameter_count(run.config), o.dtype.c_str(),
           o.zero_stage, human_bytes(memory).c_str(), room.here ? "as this machine has alone" : ("usable on " + o.gpu).c_str());
    printf("longest sample in tokens, on ranks that share it (%s), by --recompute:\n%6s", o.sp_mode.c_str(), "ranks");
    for (auto [name, level] : recompute_levels) printf("%12s ", name);
    bool beyond = false;
    for (size_t n = 1, last = 0; last < most; last = n, n = std::min(2 * n, most)) {
        printf("\n%6zu", n);
        ModelLimits limits;
        try {
            limits.ranks = ranks_of(run, n, n);
        } catch (const Error &) {
            printf("  --sp_mode %s does not suit so many ranks", o.sp_mode.c_str());
            continue;
        }
        for (auto [name, level] : recompute_levels) {
            const size_t longest = longest_sample(run, name, limits, memory, INT32_MAX);
            printf("%12s%c", longest ? std::to_string(longest).c_str() : "none", longest > max_positions ? '*' : ' ');
            beyond |= longest > max_positions;
        }
    }
    printf("\n%s", beyond ? format("* more than the model's %s, %zu\n", run.config.positions_name(), max_positions).c_str() : "");
    return 0;
}

// ---- evaluation -----------------------------------------------------------------------------------------------------------------------

void share(Comm &comm, std::vector<double> &values) {
    constexpr size_t part = 4096;  // every rank gathers this many from every other at a time
    for (size_t first = 0; first < values.size(); first += part) {
        const auto begin = values.begin() + ptrdiff_t(first),
                   end = values.begin() + ptrdiff_t(std::min(values.size(), first + part));
        const auto sums = comm.sum(std::vector<double>(begin, end));
        std::copy(sums.begin(), sums.end(), begin);
    }
}

std::vector<double> document_values(const Run &run, Model &model, const PreparedData &data, std::span<const size_t> samples) {
    std::vector<double> all(data.documents());
    const auto rows = own_rows(run.config, run.ranks, data, pack_samples(data, samples, run.options.row_tokens));
    auto told = std::chrono::steady_clock::now();
    for (size_t r = 0; r < rows.size(); r++) {
        const auto &own = rows[r];
        if (own.empty()) continue;
        if (const auto now = std::chrono::steady_clock::now(); now - told > std::chrono::seconds(10)) {
            run.say("  %zu of %zu rows", r, rows.size());
            told = now;
        }
        const Row row = make_row(data, own);
        const auto values = model.evaluate(row);
        for (size_t i = 0; run.mesh->sp_rank == 0 && i < values.size(); i++) all[row.documents[i]] = values[i];
    }
    share(run.comm, all);
    return all;
}

// For --scores: writes the value of each document, one JSON object per line.
static void write_scores(const Run &run, const PreparedData &data, std::span<const size_t> samples,
                         const std::vector<double> &values) {
    std::string lines;
    for (size_t s : samples)
        for (size_t i = data.first(s); i < data.first(s + 1); i++) {
            nlohmann::ordered_json line = {{"document", i}};
            if (run.config.reward) line["score"] = values[i];
            else line["logp"] = -values[i], line["tokens"] = data.targets(i);
            lines += line.dump() + "\n";
        }
    write_file(run.options.scores, lines);
}

// Prints how many pairs a reward model ranks rightly, and by how much.
static void report_rewards(const Run &run, const PreparedData &data, std::span<const size_t> samples,
                           const std::vector<double> &values) {
    PairTotals totals;
    for (size_t s : samples) {
        const double c = values[data.first(s)], r = values[data.first(s) + 1];
        totals += {1, reward_loss(c, r, 0, 0).loss / double(samples.size()), c, r, c * c + r * r, double(c > r)};
    }
    nlohmann::ordered_json line = {{"eval_loss", totals.loss}};
    totals.add_to(line, RM, "eval_");
    printf("loss %.6f  accuracy %.4f  margin %.4f  reward %.4f +- %.4f  over %zu pairs\n", totals.loss,
           totals.right / totals.pairs, line["eval_margin"].get<double>(), totals.reward_mean(), totals.reward_std(),
           samples.size());
    if (!run.options.log.empty()) Logger(run.options.log, true, Plan::always).write(line);
}

static void report_loss(const Run &run, const LossSums &sums, size_t documents, size_t tokens, double seconds) {
    const double n = sums.targets, loss = sums.nll / n;
    printf(
        "loss %.6f  perplexity %.4f  entropy %.4f  accuracy %.4f  over %.0f target tokens of %zu tokens in %zu documents, %.0f tok/s\n",
        loss, std::exp(loss), sums.entropy / n, sums.correct / n, n, tokens, documents, double(tokens) / seconds);
    if (!run.options.log.empty())
        Logger(run.options.log, true, Plan::always)
            .write({{"eval_loss", loss},
                    {"eval_perplexity", std::exp(loss)},
                    {"eval_entropy", sums.entropy / n},
                    {"eval_mean_token_accuracy", sums.correct / n},
                    {"eval_target_tokens", size_t(n)},
                    {"eval_tokens", tokens}});
}

static int evaluate_task(Run &run) {
    const Options &o = run.options;
    const Task like = run.config.reward ? RM : token_shards(o.data) ? PRETRAIN : SFT;  // raw data is prepared as for that task
    const std::string path = prepared_file(run, like, o.data, prepare_flags(o, like));
    std::unique_ptr<PreparedData> data;
    ModelLimits limits;
    agree(run.comm, [&] {
        data = open_data(run, path);
        limits = limits_for(run, Mode::evaluate, *data);
        if (run.config.reward && !data->pairs() && o.scores.empty())
            die("%s is a reward model, and %s holds no pairs to rank\n  fix: --scores FILE, for the score of each document",
                o.model.c_str(), o.data.c_str());
    });
    const auto model = open_model(run, limits);
    std::vector<size_t> samples(o.max_samples ? std::min(o.max_samples, data->size()) : data->size());
    for (size_t i = 0; i < samples.size(); i++) samples[i] = i;

    const auto start = std::chrono::steady_clock::now();
    const auto values = document_values(run, *model, *data, samples);
    const LossSums sums = over_ranks(run.comm, model->take_sums());
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    agree(run.comm, [&] {
        if (!run.config.reward && sums.targets == 0)
            die("no token of the first %zu documents of %s is a target\n  fix: a larger --max_samples", samples.size(),
                o.data.c_str());
        for (double value : values)
            if (!std::isfinite(value))
                die("the loss of %s on %s is not finite\n  fix: look for NaN in the weights", o.model.c_str(), o.data.c_str());
        if (run.speaks() && !o.scores.empty()) write_scores(run, *data, samples, values);
    });
    if (!run.speaks()) return 0;
    size_t tokens = 0;
    for (size_t s : samples) tokens += data->sample_length(s);
    if (!run.config.reward) report_loss(run, sums, data->first(samples.size()), tokens, seconds);
    else if (data->pairs()) report_rewards(run, *data, samples, values);
    return 0;
}

// Ranks that were started with different flags would wait for each other, or worse.
static void check_same_options(const Run &run) {
    const auto own = to_json(run.options, run.task);
    const auto all = run.comm.gather(std::string(task_name(run.task)) + " " + own.dump());
    agree(run.comm, [&] {
        for (size_t r = 1; r < all.size(); r++) {
            if (all[r] == all[0]) continue;
            const auto of = [&](size_t rank) { return nlohmann::json::parse(all[rank].substr(all[rank].find('{'))); };
            const auto here = of(0), there = of(r);
            for (const auto &[name, value] : here.items())
                if (name != "rank" && name != "threads" && there.contains(name) && there[name] != value)
                    die("rank 0 was started with --%s %s, rank %zu with %s\n  fix: the same command for every rank", name.c_str(),
                        value.dump().c_str(), r, there[name].dump().c_str());
            if (here.size() != there.size())
                die("rank 0 was started for another task than rank %zu\n  fix: the same command for every rank", r);
        }
    });
}

int run_task(const char *program, const Parsed &parsed, Comm &comm, size_t sharing, const ModelFactory &make_model) {
    Run run{program, parsed.task, parsed.options, comm, sharing, make_model};
    check_same_options(run);
    comm.check = run.options.check_comm;
    agree(comm, [&] {
        const Options &o = run.options;
        const size_t planned = std::max({o.ranks, o.world_size, size_t(comm.size)});
        const size_t world = o.fit ? 1 : o.plan ? planned : size_t(comm.size), demo = world % 2 ? 1 : 2;
        open_model_config(run);
        if (parsed.default_max_len) run.options.max_len = std::min(o.max_len, run.config.max_positions);
        run.ranks = ranks_of(run, world, o.fit ? 1 : o.ring_attn_size ? o.ring_attn_size : demo);
    });
    if (run.options.plan && (run.task & PAIRS)) {
        std::optional<PairTask> task;
        agree(comm, [&] { task.emplace(run); });
        run.beside = task->resident_reference();
    }
    std::optional<Continuation> continuation;
    if (run.options.plan && run.options.sample_every) continuation.emplace(run);
    if (run.options.plan && !run.speaks()) return 0;
    if (run.options.plan) return run.options.fit ? print_fit(run) : print_plan(run, continuation);
    for (const char *file : {"config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"})
        if (!run.model_dir.empty()) expect_same_file(run, run.model_dir + "/" + file, true);
    const auto processes = comm.gather(format("%s %d", host_name().c_str(), int(getpid())));
    run.in_process = size_t(std::count(processes.begin(), processes.end(), processes[size_t(comm.rank)]));
    run.mesh = std::make_shared<Mesh>(comm, int(run.ranks.sp));
    if (comm.size > 1) run.say("%s", mesh_line(run.ranks).c_str());
    if (const std::string note = ring_across_hosts(comm.gather(host_name()), int(run.ranks.sp)); !note.empty())
        run.say("note: %s", note.c_str());
    switch (run.task) {
        case EVAL: return evaluate_task(run);
        case GENERATE: return generate(run);
        default: return train(run);
    }
}
