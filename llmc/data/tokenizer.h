// A Hugging Face tokenizer.json, read for two things: to turn ids into text, and to tell whether data and model speak of the same
// tokens. Text becomes ids in data/prepare.py.
//
// Two kinds of byte-pair encoding are known by their "decoder" section: byte-level (GPT-2, Llama 3, Qwen, SmolLM2), where each
// character of a token stands for one byte, and SentencePiece's (Llama 2, Mistral), where U+2581 stands for a space and <0xNN>
// for a byte.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

class Tokenizer {
  public:
    explicit Tokenizer(const std::string &path);

    size_t size() const { return tokens_.size(); }  // largest id + 1

    // Bytes of the ids; a character that they leave unfinished stays unfinished. Special tokens: <s>, <|im_end|> and the like.
    std::string decode(std::span<const int32_t> ids, bool skip_special = true) const;
    bool is_special(int32_t id) const { return token(id).special; }

  private:
    struct Token {
        std::string bytes;
        bool known = false, special = false;
    };
    const Token &token(int32_t id) const;

    std::string path_;
    std::vector<Token> tokens_;  // by id
    size_t strip_ = 0;           // spaces to take from the start of a text
};

// FNV-1a (64 bit, 16 hex digits) of "id\ttoken\tspecial\n" for every id in increasing order: the vocabulary with the added tokens
// over it, special 1 or 0. Equal for two files exactly if they mean the same by every id, however they are laid out.
std::string tokenizer_hash(const std::string &path);
