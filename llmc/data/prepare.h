// Turns raw data (JSONL, CSV, parquet, token shards) into a prepared file (tokens.h) by running data/prepare.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// The vocabulary of token ids.
struct TokenMeaning {
    std::string model_dir;       // the directory with the tokenizer; empty with --preset
    std::string tokenizer_hash;  // empty if there is no tokenizer
    size_t size;                 // vocabulary size of the model
    std::vector<int32_t> eos;
};

// Returns the prepared file for `path`, the value of --FLAG: the file itself, or for raw data the output of data/prepare.py for `kind`, for example
// "sft", with `extra` as further arguments. Prepared files are cached, under a key of all inputs that affect them (data/cache_key.py). A file made
// without a path, from --prompt, belongs to the caller, who removes it. Dies with prepare.py's message.
std::string prepare(const TokenMeaning &meaning, const std::string &kind, const std::string &flag, const std::string &path,
                    const std::vector<std::string> &extra);

bool token_shards(const std::string &list);  // true if all files of a comma-separated list are token shards (.bin)
