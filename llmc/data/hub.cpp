#include "hub.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>

#include "../core/common.h"
#include "../core/json.h"
#include "python.h"

namespace fs = std::filesystem;

bool is_hub_name(const std::string &name) {
    static const std::regex form(R"([\w.-]+/[\w.-]+(@[\w./-]+)?)");
    std::error_code none;
    return std::regex_match(name, form) && name[0] != '.' && !fs::exists(name, none);
}

// ---- the cache, in huggingface_hub's layout ----------------------------------------------------------------------------------------

static std::string variable(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

static fs::path cache() {
    std::string dir = variable("HF_HUB_CACHE");
    if (dir.empty()) dir = variable("HUGGINGFACE_HUB_CACHE");
    if (dir.empty() && !variable("HF_HOME").empty()) dir = variable("HF_HOME") + "/hub";
    if (dir.empty() && !variable("XDG_CACHE_HOME").empty()) dir = variable("XDG_CACHE_HOME") + "/huggingface/hub";
    if (dir.empty()) dir = "~/.cache/huggingface/hub";
    return dir.starts_with("~") ? variable("HOME") + dir.substr(1) : dir;
}

// Returns true if the directory has all files that a run needs. Other programs may have only fetched the tokenizer.
static bool is_whole(const fs::path &dir, bool weights) {
    const fs::path index = dir / "model.safetensors.index.json";
    if (!fs::exists(dir / "config.json")) return false;
    if (!weights || fs::exists(dir / "model.safetensors")) return true;
    if (!fs::exists(index)) return false;
    const nlohmann::json files = read_json(index);
    const auto map = files.value("weight_map", nlohmann::json::object());
    return std::all_of(map.begin(), map.end(),
                       [&](const auto &file) { return fs::exists(dir / file.template get<std::string>()); });
}

// Returns the snapshot of a model, empty if there is none. refs/REVISION holds the commit that a branch or tag had when it was fetched.
static fs::path snapshot(std::string name, const std::string &revision) {
    name.replace(name.find('/'), 1, "--");
    const fs::path model = cache() / ("models--" + name);
    std::string commit;
    std::ifstream(model / "refs" / revision) >> commit;
    const fs::path dir = model / "snapshots" / (commit.empty() ? revision : commit);
    return fs::is_directory(dir) ? dir : fs::path();
}

static bool is_offline() {
    for (const char *name : {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}) {
        std::string value = variable(name);
        std::transform(value.begin(), value.end(), value.begin(), [](unsigned char c) { return char(std::toupper(c)); });
        if (value == "1" || value == "ON" || value == "YES" || value == "TRUE") return true;
    }
    return false;
}

std::string fetched_model(const std::string &name) {
    std::error_code none;
    if (!is_hub_name(name)) return fs::exists(name, none) ? name : "";
    const size_t at = name.find('@');
    return snapshot(name.substr(0, at), at == name.npos ? "main" : name.substr(at + 1));
}

std::string model_directory(const std::string &name, bool weights) {
    if (!is_hub_name(name)) return name;
    const size_t at = name.find('@');
    const std::string model = name.substr(0, at), revision = at == name.npos ? "main" : name.substr(at + 1);
    fs::path dir = snapshot(model, revision);
    if (!dir.empty() && is_whole(dir, weights)) return dir;
    const std::string elsewhere = format("where there is a network: hf download %s%s --local-dir DIR, and give DIR",
                                         model.c_str(), at == name.npos ? "" : (" --revision " + revision).c_str());
    if (is_offline())
        die("%s: there is no such directory, the cache %s does not have all of that model, and HF_HUB_OFFLINE forbids asking the hub\n"
            "  fix: unset HF_HUB_OFFLINE; or, %s",
            name.c_str(), cache().c_str(), elsewhere.c_str());
    run_python(name + ", which is to be fetched from the hub,", "data/hub.py", {model, revision}, true);
    dir = snapshot(model, revision);
    if (dir.empty() || !is_whole(dir, weights))
        die("%s: the hub has no %s of that model\n  fix: use a model with weights in safetensors", name.c_str(),
            dir.empty() || !fs::exists(dir / "config.json") ? "config.json" : "model.safetensors");
    return dir;
}
