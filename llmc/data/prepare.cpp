#include "prepare.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "../core/common.h"
#include "../core/file.h"
#include "python.h"
#include "tokens.h"

namespace fs = std::filesystem;

static std::vector<std::string> names_in(const std::string &list) {
    std::vector<std::string> names;
    std::istringstream in(list);
    for (std::string name; std::getline(in, name, ',');) names.push_back(name);
    return names;
}

bool token_shards(const std::string &list) {
    const auto names = names_in(list);
    return !names.empty() && std::all_of(names.begin(), names.end(), [](const std::string &name) {
        return name.substr(0, name.find('[')).ends_with(".bin");
    });
}

// Returns the arguments that define the ids: a tokenizer, or two numbers for shards, which already contain ids.
static std::vector<std::string> vocabulary_flags(const TokenMeaning &v, const std::string &kind, const std::string &path) {
    if (!v.tokenizer_hash.empty()) return {"--tokenizer", v.model_dir};
    if (kind == "pretrain" && token_shards(path) && !v.eos.empty())
        return {"--eos_token_id", std::to_string(v.eos[0]), "--vocab_size", std::to_string(v.size)};
    die("%s is raw data, which needs a tokenizer, but %s has no tokenizer.json\n"
        "  fix: --model DIR with a tokenizer, a prepared .safetensors file, or, to pretrain or evaluate, token shards (.bin) and a model with eos_token_id",
        path.empty() ? "the prompt" : path.c_str(), v.model_dir.empty() ? "a --preset" : v.model_dir.c_str());
}

// A cached file may be damaged, or truncated after a full disk.
static bool is_whole(const std::string &path) {
    try {
        PreparedData(path, SIZE_MAX, "");
    } catch (const Error &) {
        return false;
    }
    return true;
}

// Returns the path of a new, empty file of the cache.
static std::string own_cache_file() {
    const std::string suffix = ".safetensors";
    std::string path = cache_file("prompt-XXXXXX" + suffix);
    const int fd = mkstemps(path.data(), int(suffix.size()));
    if (fd < 0)
        die("%s: cannot create: %s\n  fix: set XDG_CACHE_HOME to a place that can be written to", path.c_str(), strerror(errno));
    close(fd);
    return path;
}

std::string prepare(const TokenMeaning &meaning, const std::string &kind, const std::string &flag, const std::string &path,
                    const std::vector<std::string> &extra) {
    const std::string extension = fs::path(path).extension();  // without one it may be a hub name, OWNER/NAME
    if ((extension == ".jsonl" || extension == ".json" || extension == ".csv" || extension == ".parquet" ||
         extension == ".bin") &&
        path.find_first_of(",*") == path.npos && !fs::exists(path))
        die("no such file: %s\n  fix: --%s FILE, prepared (.safetensors) or raw (.jsonl, .csv, .parquet, .bin)", path.c_str(),
            flag.c_str());
    if (path.ends_with(".safetensors")) return path;
    if (const std::string script = program_file("data/prepare.py"); !fs::exists(script))
        die("%s is raw data, and %s, which prepares it, does not exist\n  fix: run the program from the source tree in which it was built, or through a link to it",
            path.empty() ? "the prompt" : path.c_str(), script.c_str());
    std::vector<std::string> arguments = vocabulary_flags(meaning, kind, path);
    arguments.insert(arguments.begin(), kind);
    if (!path.empty()) arguments.insert(arguments.end(), {"--" + flag, path});
    arguments.insert(arguments.end(), extra.begin(), extra.end());
    const auto run = [&](const std::vector<std::string> &more, bool shows) {
        std::vector<std::string> all = arguments;
        all.insert(all.end(), more.begin(), more.end());
        return run_python("raw data (unlike a prepared .safetensors file)", "data/prepare.py", all, shows);
    };
    if (path.empty()) {  // typed prompts are not cached
        const std::string own = own_cache_file();
        try {
            run({"--out", own}, true);
        } catch (const Error &) {
            fs::remove(own);
            throw;
        }
        return own;
    }
    const std::string key = run({"--key"}, false).substr(0, 32);
    const std::string out = cache_file(key + ".safetensors");
    if (!fs::exists(out) || !is_whole(out)) run({"--key", key, "--out", out}, true);
    return out;
}
