// Reads a Hugging Face tokenizer.json for two purposes: to convert ids to text, and to check that data and model use the same tokens.
// data/prepare.py converts text to ids.
//
// A text is decoded as the package tokenizers does, by the section "decoder": byte-level encodings (GPT-2, Llama 3, Qwen, SmolLM2), where each
// character of a token stands for one byte, or SentencePiece (Llama 2, Mistral), where U+2581 stands for a space and <0xNN> for a byte.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

// A step of the section "decoder". It transforms the tokens of a text; the next step transforms its output.
struct TokenDecoder {
    enum Kind { byte_level, byte_fallback, fuse, replace, metaspace, strip } kind;
    std::string from = {}, to = {};  // replace, metaspace: of the first token
    size_t most = 0;                 // strip: spaces at the beginning
};

class Tokenizer {
  public:
    explicit Tokenizer(const std::string &path);

    size_t size() const { return size_t(tokens_.rbegin()->first) + 1; }  // largest id + 1

    // Returns the text of the ids. An incomplete character of a byte-level encoding remains incomplete. Special tokens are <s>, <|im_end|> and so
    // on.
    std::string decode(std::span<const int32_t> ids, bool skip_special = true) const;
    bool is_special(int32_t id) const { return token(id).special; }
    bool is_byte(int32_t id) const;  // decoded together with its neighbouring byte tokens

  private:
    struct Token {
        std::string text;  // as the decoder gets it: an added token may be normalised
        bool special = false;
    };
    const Token &token(int32_t id) const;

    std::string path_;
    // By id. A vector would take hundreds of megabytes for one large id in a broken file.
    std::map<int32_t, Token> tokens_;
    std::vector<TokenDecoder> decoders_;
};

// Returns a special token of the tokenizer in `dir`, such as "eos_token", from its tokenizer_config.json; empty if it has none.
std::string special_token(const std::string &dir, const char *name);

// Returns the FNV-1a hash (64 bits, 16 hex digits) of "id\ttoken\tspecial\n" for every id in increasing order. Added tokens replace tokens of the
// vocabulary; `special` is 1 or 0. Two files have the same hash if every id means the same in both, independently of their layout.
// size: set to the largest id + 1
std::string tokenizer_hash(const std::string &path, size_t *size = nullptr);

// Returns the first id that two tokenizers give to different tokens, in words; empty if there is none.
std::string first_difference(const std::string &path, const std::string &other);

bool is_utf8(const std::string &bytes);

std::set<std::string> added_tokens(const std::string &path);  // returns their texts, which are never split

// Writes a tokenizer.json with further tokens, whose ids follow the largest existing id. Tokens that it already has do not change.
// Tokens of the form <|name|> become special: they can end a turn, and are left out of decoded answers.
void add_tokens(const std::string &path, const std::vector<std::string> &tokens, const std::string &to);
