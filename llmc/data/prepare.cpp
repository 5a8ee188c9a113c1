#include "prepare.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <sstream>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/hash.h"
#include "python.h"

namespace fs = std::filesystem;

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
    for (std::string name : names_in(path)) {
        if (!fs::exists(name, none))
            name.resize(std::min(name.size(), name.find_first_of(":@[")));  // a directory's subset or split
        if (fs::is_directory(name, none))
            for (const auto &entry : fs::recursive_directory_iterator(name))
                if (entry.is_regular_file()) files.insert(entry.path());
        if (fs::is_regular_file(name, none)) files.insert(name);
        glob_t found{};
        if (glob(name.c_str(), 0, nullptr, &found) == 0) files.insert(found.gl_pathv, found.gl_pathv + found.gl_pathc);
        globfree(&found);
    }
    for (const std::string &file : files)
        if (fs::is_regular_file(file, none))
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
    if (const std::string script = program_file("data/prepare.py"); !fs::exists(script))
        die("%s is raw data, and %s, which prepares it, does not exist\n  fix: leave the program in the tree that it was built in, and call it there or by a link",
            path.empty() ? "the prompt" : path.c_str(), script.c_str());
    std::vector<std::string> arguments = vocabulary_flags(meaning, kind, path);
    arguments.insert(arguments.begin(), kind);
    if (!path.empty()) arguments.insert(arguments.end(), {"--input", path});
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    const std::string key = preparation_key(path, arguments, meaning.tokenizer_hash);
    const std::string out = cache_file(format("%s.safetensors", hash_of(key).c_str()));
    if (fs::exists(out)) return out;
    arguments.insert(arguments.end(), {"--out", out});
    run_python("raw data (unlike a prepared .safetensors file)", "data/prepare.py", arguments, true);
    return out;
}
