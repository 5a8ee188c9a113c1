#include "settings.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "../core/common.h"
#include "../core/json.h"
#include "../train/options.h"

using nlohmann::ordered_json;

static std::string with_underscores(std::string name) {
    std::replace(name.begin(), name.end(), '-', '_');
    return name;
}

static void read_config(std::vector<Setting> &out, const std::string &file, std::string &stranger) {
    if (file.ends_with(".yaml") || file.ends_with(".yml")) {
        stranger = file + " is YAML";
        return;
    }
    const ordered_json json = read_json(file);
    if (!json.is_object()) die("%s is not a JSON object\n  fix: write the flags as {\"max_len\": 4096, ...}", file.c_str());
    for (const auto &[key, value] : json.items()) {
        Setting s{with_underscores(key), {}, key + " in " + file};
        if (value.is_array() && value.empty()) continue;  // the run log contains an empty list for a list that was not given
        if (value.is_null()) die("%s is null\n  fix: give it a value or remove it", s.where.c_str());
        if (value.is_object() || (value.is_array() && value[0].is_object()))
            stranger = s.where + " is not a flag of this program";
        else if (value.is_array())
            for (const ordered_json &v : value) s.values.push_back(to_text(v));
        else s.values.push_back(to_text(value));
        out.push_back(s);
    }
}

std::vector<Setting> read_settings(const std::vector<std::string> &words, size_t first,
                                   const std::function<bool(const std::string &name)> &is_own, std::string &stranger) {
    std::vector<Setting> given, all;
    for (size_t i = first; i < words.size() && stranger.empty(); i++) {
        const std::string &word = words[i];
        const size_t equals = word.find('=');
        if (!word.starts_with("--")) {
            stranger = "\"" + word + "\" is not a flag of this program";
            break;
        }
        Setting s{with_underscores(word.substr(2, equals == word.npos ? equals : equals - 2)), {}, word.substr(0, equals)};
        if (equals != word.npos) s.values.push_back(word.substr(equals + 1));
        while (equals == word.npos && i + 1 < words.size() && !words[i + 1].starts_with("--")) s.values.push_back(words[++i]);
        if (s.name != "config" && s.name != "config_file") given.push_back(s);
        else if (s.values.size() == 1 && !s.values[0].empty()) read_config(all, s.values[0], stranger);
        else die("--config needs one file\n  fix: --config FILE.json");
    }
    all.insert(all.end(), given.begin(), given.end());
    for (const Setting &s : all)
        if (stranger.empty() && !is_own(s.name)) stranger = s.where + " is not a flag of this program";
    return all;
}
