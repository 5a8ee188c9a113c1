// What a user gave: names with values, from the command line and from the files of --config.
#pragma once
#include <functional>
#include <string>
#include <vector>

struct Setting {
    std::string name;  // with `_`, without dashes
    std::vector<std::string> values;
    std::string where;  // as the user wrote it: "--max-len" or "max-len in run.json"
};

// Returns the settings of the words from number `first` on, in order of rising precedence, so the settings of JSON files (--config) come first. If
// a word is not a flag of this program's own, or a file is YAML, `stranger` describes it. Dies if a file cannot be read.
std::vector<Setting> read_settings(const std::vector<std::string> &words, size_t first,
                                   const std::function<bool(const std::string &name)> &is_own, std::string &stranger);
