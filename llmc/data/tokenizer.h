// A Hugging Face tokenizer.json is read here for two purposes: to turn ids into text, and to tell whether data and model use the same
// tokens. data/prepare.py turns text into ids.
//
// Two kinds of byte-pair encoding are recognised by the section "decoder": byte-level (GPT-2, Llama 3, Qwen, SmolLM2), where each
// character of a token stands for one byte, and SentencePiece's (Llama 2, Mistral), where U+2581 stands for a space and <0xNN>
// for a byte.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>

class Tokenizer {
  public:
    explicit Tokenizer(const std::string &path);

    size_t size() const { return size_t(tokens_.rbegin()->first) + 1; }  // largest id + 1

    // Returns the bytes of the ids. If the last character is incomplete, it stays incomplete. Special tokens are <s>, <|im_end|> and the like.
    std::string decode(std::span<const int32_t> ids, bool skip_special = true) const;
    bool is_special(int32_t id) const { return token(id).special; }

  private:
    struct Token {
        std::string bytes;
        bool special = false;
    };
    const Token &token(int32_t id) const;

    std::string path_;
    std::map<int32_t, Token>
        tokens_;        // by id; not a vector, which one large id in a broken file would make hundreds of megabytes long
    size_t strip_ = 0;  // spaces to take from the start of a text
};

// Returns a special token of the tokenizer in `dir`, such as "eos_token", by its tokenizer_config.json; empty if it has none.
std::string special_token(const std::string &dir, const char *name);

// Returns FNV-1a (64 bit, 16 hex digits) of "id\ttoken\tspecial\n" for every id in increasing order. Added tokens replace those of the
// vocabulary; `special` is 1 or 0. Two files have the same hash if every id means the same in both, however they are laid out.
std::string tokenizer_hash(const std::string &path);
