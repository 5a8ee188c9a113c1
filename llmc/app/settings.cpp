#include "settings.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "../core/common.h"
#include "../data/python.h"
#include "../train/options.h"

using nlohmann::ordered_json;

static Setting setting(const std::string &name, const std::string &where) {
    Setting s{name, {}, where};
    std::replace(s.name.begin(), s.name.end(), '-', '_');
    return s;
}

// A list of data sets as TRL and Axolotl write it, [{path, name, split, ...}], becomes the names that --data takes. The other keys of an entry are
// settings of their own. The path may be a kind of file, which data_files names.
static Setting read_datasets(std::vector<Setting> &out, const ordered_json &list, const std::string &key,
                             const std::string &where) {
    std::string all;
    for (ordered_json entry : list) {
        const std::string path = entry["path"];
        std::vector<std::string> names = {path};
        if (entry.contains("data_files") && (path == "json" || path == "csv" || path == "parquet")) {
            const ordered_json files = entry["data_files"];
            names = files.is_array() ? files.get<std::vector<std::string>>() : std::vector<std::string>{files};
            entry.erase("data_files");
        }
        for (std::string name : names) {
            if (entry.contains("name")) name += ":" + to_text(entry["name"]);
            if (entry.contains("split") && (names[0] == path || entry["split"] != "train"))
                name += "[" + to_text(entry["split"]) + "]";
            all += (all.empty() ? "" : ",") + name;
        }
        for (const auto &[other, value] : entry.items())
            if (value.is_object())  // message_property_mappings: {role: from, content: value}
                for (const auto &[inner, text] : value.items())
                    out.push_back({"datasets." + other + "." + inner, {to_text(text)}, other + "." + inner + " of " + where});
            else if (other != "path" && other != "name" && other != "split")
                out.push_back({"datasets." + other, {to_text(value)}, other + " of " + where});
    }
    return {key, {all}, where};
}

static void read_object(std::vector<Setting> &out, const ordered_json &json, const std::string &prefix, const std::string &file) {
    for (const auto &[key, value] : json.items()) {
        const std::string where = prefix + key + " in " + file;
        Setting s = setting(prefix + key, where);
        if (value.is_object()) {  // {"adam": {"lr": 1e-5}} is adam.lr
            read_object(out, value, s.name + ".", file);
            continue;
        }
        if (value.is_array() && value.empty()) continue;  // the run log writes so for a list that was not given
        if (value.is_null()) die("%s is null\n  fix: give it a value or remove it", where.c_str());
        if (value.is_array() && value[0].is_object() && value[0].contains("path")) s = read_datasets(out, value, s.name, where);
        else if (value.is_array())
            for (const ordered_json &v : value) s.values.push_back(to_text(v));
        else s.values.push_back(to_text(value));
        out.push_back(s);
    }
}

static void read_config(std::vector<Setting> &out, const std::string &file) {
    std::ifstream in(file);
    if (!in)
        die("cannot open %s\n  fix: --config takes a JSON or YAML file with flags, such as {\"max_len\": 4096}", file.c_str());
    const bool yaml = file.ends_with(".yaml") || file.ends_with(".yml");
    try {
        const ordered_json json =
            yaml ? ordered_json::parse(run_python("YAML", "data/yaml_json.py", {file})) : ordered_json::parse(in);
        if (!json.is_object()) die("%s is not a JSON object\n  fix: write the flags as {\"max_len\": 4096, ...}", file.c_str());
        read_object(out, json, "", file);
    } catch (const ordered_json::parse_error &e) {
        die("%s is not valid JSON: %s", file.c_str(), e.what());
    }
}

std::vector<Setting> read_settings(const std::vector<std::string> &arguments, size_t first) {
    std::vector<Setting> given, all;
    for (size_t i = first; i < arguments.size(); i++) {
        const std::string &word = arguments[i];
        if (!word.starts_with("--"))
            die("unexpected argument \"%s\"\n  fix: flags are --name value; put quotes around a value with spaces", word.c_str());
        const size_t equals = word.find('=');
        Setting s = setting(word.substr(2, equals == word.npos ? equals : equals - 2), word.substr(0, equals));
        if (equals != word.npos) s.values.push_back(word.substr(equals + 1));
        while (equals == word.npos && i + 1 < arguments.size() && !arguments[i + 1].starts_with("--"))
            s.values.push_back(arguments[++i]);
        if (s.name != "config" && s.name != "config_file") given.push_back(s);
        else if (s.values.size() == 1) read_config(all, s.values[0]);
        else die("--config needs one file");
    }
    all.insert(all.end(), given.begin(), given.end());
    return all;
}
