#include "prepare.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/hash.h"

namespace fs = std::filesystem;

std::string python_program() {
    const std::string own = program_file(".venv/bin/python3");
    return fs::exists(own) ? own : "python3";
}

static void run_prepare(const std::vector<std::string> &arguments) {
    std::vector<std::string> command = {python_program(), program_file("data/prepare.py")};
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

bool token_shards(const std::string &list) {
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

// Returns what gives ids their meaning: a tokenizer, or two numbers for shards, which already hold ids.
static std::vector<std::string> vocabulary_flags(const TokenMeaning &v, const std::string &kind, const std::string &path) {
    if (!v.tokenizer_hash.empty()) return {"--tokenizer", v.model_dir};
    if (kind == "pretrain" && token_shards(path) && !v.eos.empty())
        return {"--eos_token_id", std::to_string(v.eos[0]), "--vocab_size", std::to_string(v.size)};
    die("%s is raw data, which needs a tokenizer, but %s has no tokenizer.json\n"
        "  fix: --model DIR with a tokenizer, a prepared .safetensors file, or, to pretrain or evaluate, token shards (.bin) and a model with eos_token_id",
        path.empty() ? "the prompt" : path.c_str(), v.model_dir.empty() ? "a --preset" : v.model_dir.c_str());
}

std::string prepare(const TokenMeaning &meaning, const std::string &kind, const std::string &path,
                    const std::vector<std::string> &extra) {
    const std::string extension = fs::path(path).extension();  // without one it may be a hub name, OWNER/NAME
    if ((extension == ".jsonl" || extension == ".json" || extension == ".csv" || extension == ".parquet" ||
         extension == ".bin") &&
        path.find_first_of(",*") == path.npos && !fs::exists(path))
        die("no such file: %s\n  fix: --data FILE, prepared (.safetensors) or raw (.jsonl, .csv, .parquet, .bin)", path.c_str());
    if (path.ends_with(".safetensors")) return path;
    std::vector<std::string> arguments = vocabulary_flags(meaning, kind, path);
    arguments.insert(arguments.begin(), kind);
    if (!path.empty()) arguments.insert(arguments.end(), {"--input", path});
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    const std::string key = preparation_key(path, arguments, meaning.tokenizer_hash);
    const std::string out = cache_file(format("%s.safetensors", hash_of(key).c_str()));
    if (fs::exists(out)) return out;
    arguments.insert(arguments.end(), {"--out", out});
    run_prepare(arguments);
    return out;
}
