// What a user gave: names with values, from the command line and from the files of --config.
#pragma once
#include <string>
#include <vector>

struct Setting {
    std::string name;  // with `_`, without dashes; a key within others has their names in front: "trl.beta"
    std::vector<std::string> values;
    std::string where;  // as the user wrote it: "--max-len" or "max-len in run.json"
};

// Returns the settings of the words from number `first` on, in order of rising precedence, so those of --config come first. A file that ends with
// .yaml or .yml is read as YAML, by Python, any other as JSON. Dies if a word is no flag or a file cannot be read.
std::vector<Setting> read_settings(const std::vector<std::string> &arguments, size_t first);
