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
    size_t size;                 // the model's
    std::vector<int32_t> eos;
};

// Returns the prepared file for `path`, which the user gave as --FLAG: the file itself, or for raw data the file that data/prepare.py makes for
// `kind`, "sft" for example, with `extra` as further arguments. Such files are kept in a cache, under a key of everything that shapes them
// (data/cache_key.py); one that was made without a path, of --prompt, is the caller's, who removes it. Dies with prepare.py's message.
std::string prepare(const TokenMeaning &meaning, const std::string &kind, const std::string &flag, const std::string &path,
                    const std::vector<std::string> &extra);

bool token_shards(const std::string &list);  // whether all files of a list with commas are shards of tokens (.bin)
