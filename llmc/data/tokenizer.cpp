#include "tokenizer.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/json.h"

using json = nlohmann::json;

namespace {

struct Entry {
    std::string text;
    bool special = false, normalized = false;
};
using Vocabulary = std::map<size_t, Entry>;  // by id

constexpr size_t max_vocabulary = size_t(1) << 24;  // a larger id means a broken file
constexpr size_t max_token_bytes =
    1 << 16;  // and so does a longer token, which a chain of replacements can produce from one character

}  // namespace

// Returns the id of a token in the section `name` of `fields`.
static size_t read_id(const Fields &fields, const char *name, const std::string &text, const json *id) {
    if (!id || !id->is_number_integer() || id->get<int64_t>() < 0 || id->get<int64_t>() >= int64_t(max_vocabulary))
        fields.refuse(name, format("gives token \"%s\" the id %s, which is not a number from 0 to %zu", text.c_str(),
                                   id ? id->dump().c_str() : "null", max_vocabulary - 1));
    return id->get<size_t>();
}

// Returns model.vocab, overridden by added_tokens.
static Vocabulary read_vocabulary(const json &tokenizer, const std::string &path) {
    const Fields fields(tokenizer, path), model = fields.object("model");
    const json *vocab = model.find("vocab"), *added_tokens = fields.find("added_tokens");
    if (!vocab || !vocab->is_object()) model.refuse("vocab", "must be a table of token and id, as byte-pair encoding has it");
    Vocabulary entries;
    for (const auto &[text, id] : vocab->items()) {
        const auto [at, fresh] = entries.try_emplace(read_id(model, "vocab", text, &id), Entry{text});
        const char *one = at->second.text.c_str(), *two = text.c_str();
        if (!fresh) model.refuse("vocab", format("gives id %zu to both \"%s\" and \"%s\"", at->first, one, two));
    }
    if (added_tokens && !added_tokens->is_array()) fields.refuse("added_tokens", "must be a list");
    for (const json &entry : added_tokens ? *added_tokens : json::array()) {
        const Fields added(entry, path, "added_tokens.");
        const std::string text = added.text("content");
        entries[read_id(fields, "added_tokens", text, added.find("id"))] = {text, added.boolean("special"),
                                                                            added.boolean("normalized", false)};
    }
    if (entries.empty()) model.refuse("vocab", "is empty");
    return entries;
}

// ---- decoders

// Reads the section "decoder", in the order of its steps.
static void read_decoder(std::vector<TokenDecoder> &decoders, const json &section, const std::string &path) {
    const Fields fields(section, path, "decoder.");
    const std::string type = fields.text("type");
    using enum TokenDecoder::Kind;
    if (type == "Sequence") {
        const json *parts = fields.find("decoders");
        if (!parts || !parts->is_array()) fields.refuse("decoders", "must be a list");
        for (const json &part : *parts) read_decoder(decoders, part, path);
    } else if (type == "ByteLevel") {
        decoders.push_back({byte_level});
    } else if (type == "ByteFallback") {
        decoders.push_back({byte_fallback});
    } else if (type == "Fuse") {
        decoders.push_back({fuse});
    } else if (type == "Replace") {
        decoders.push_back({replace, fields.object("pattern").text("String"), fields.text("content")});
    } else if (type == "Metaspace") {
        const char *usual = fields.boolean("add_prefix_space", true) ? "always" : "never";
        decoders.push_back(
            {metaspace, fields.text("replacement", "\u2581"), fields.text("prepend_scheme", usual) == "never" ? " " : ""});
    } else if (type == "Strip" && section.value("content", json()) == " " && section.value("stop", json()) == 0) {
        decoders.push_back({strip, "", "", fields.count("start")});
    } else {
        die("%s: decoder %s is not known\n  fix: use a model whose tokenizer is a byte-pair encoding with the decoder ByteLevel, Metaspace, or a Sequence of "
            "Replace, ByteFallback, Fuse and Strip",
            path.c_str(), section.dump().c_str());
    }
}

// GPT-2 writes every byte as one printable character: the printable characters of Latin-1 stand for themselves, and the other 68 bytes are
// numbered from U+0100. The table is indexed by code point, with -1 for a code point that is not a byte.
static std::array<int, 256 + 68> make_byte_of_character() {
    std::array<int, 256 + 68> byte;
    byte.fill(-1);
    size_t next = 256;
    for (int b = 0; b < 256; b++) {
        const bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        byte[printable ? size_t(b) : next++] = b;
    }
    return byte;
}

// A token with any other character, such as some added tokens, stands for its own text.
static std::string decode_byte_level(const std::string &text) {
    static const auto byte_of_character = make_byte_of_character();
    std::string bytes;
    for (size_t i = 0; i < text.size(); i++) {
        size_t character = uint8_t(text[i]);
        if (character >> 5 == 6 && i + 1 < text.size())  // 110xxxxx 10xxxxxx: no character needs a longer code
            character = (character & 0x1F) << 6 | (uint8_t(text[++i]) & 0x3F);
        else if (character >= 0x80) return text;
        if (character >= byte_of_character.size() || byte_of_character[character] < 0) return text;
        bytes.push_back(char(byte_of_character[character]));
    }
    return bytes;
}

static std::string encode_byte_level(const std::string &bytes) {
    static const auto byte_of_character = make_byte_of_character();
    std::string text;
    for (char byte : bytes) {
        const auto character = size_t(std::ranges::find(byte_of_character, int(uint8_t(byte))) - byte_of_character.begin());
        if (character < 0x80) text.push_back(char(character));
        else text += {char(0xC0 | character >> 6), char(0x80 | (character & 0x3F))};
    }
    return text;
}

// Stops if the text grows beyond the limit for a token.
static std::string replace_all(const std::string &text, const std::string &from, const std::string &to) {
    if (from.empty()) return text;
    std::string out;
    size_t done = 0;  // bytes of text
    for (size_t at; out.size() <= done + max_token_bytes && (at = text.find(from, done)) != std::string::npos;
         done = at + from.size())
        out.append(text, done, at - done).append(to);
    out.append(text, done);
    return out;
}

// ---- normalisers

// Returns the text of an added token after a section "normalizer". Like the package tokenizers from version 0.23 on, the decoder gets the normalised
// text of an added token that is found in normalised text: with U+2581 for each space, and before the token, in Llama 2. NFC leaves text as it is, because
// texts are composed; the other Unicode forms leave ASCII.
static std::string normalised(const json &section, const std::string &text, const std::string &path) {
    if (section.is_null()) return text;
    const Fields fields(section, path, "normalizer.");
    const std::string type = fields.text("type");
    const bool ascii = std::ranges::all_of(text, [](char c) { return uint8_t(c) < 0x80; });
    if (type == "Sequence") {
        std::string out = text;
        const json *parts = fields.find("normalizers");
        for (const json &part : parts && parts->is_array() ? *parts : json::array()) out = normalised(part, out, path);
        return out;
    }
    if (type == "Prepend") return text.empty() ? text : fields.text("prepend") + text;
    if (type == "Replace" && fields.object("pattern").has("String"))
        return replace_all(text, fields.object("pattern").text("String"), fields.text("content"));
    if (type == "NFC" || (ascii && (type == "NFD" || type == "NFKC" || type == "NFKD" || type == "StripAccents"))) return text;
    if (type == "Lowercase" && ascii) {
        std::string out = text;
        for (char &c : out) c = char(std::tolower(c));
        return out;
    }
    if (type == "Strip" && ascii) {
        const char *const blank = " \t\n\v\f\r";
        const size_t begin = fields.boolean("strip_left") ? text.find_first_not_of(blank) : 0;
        const size_t end = fields.boolean("strip_right") ? text.find_last_not_of(blank) + 1 : text.size();
        return begin == text.npos ? "" : text.substr(begin, end - begin);
    }
    if (type == "ByteLevel") return encode_byte_level(text);
    die("%s: normalizer %s is not known, and the added token \"%s\" is normalized\n  fix: use a model whose normalizer is a Sequence of Prepend, Replace (of a String), "
        "Lowercase, Strip, ByteLevel and Unicode forms, or add the token with normalized false",
        path.c_str(), section.dump().c_str(), text.c_str());
}

// Returns the byte of a token of the form <0xNN>, or -1.
static int byte_of(const std::string &token) {
    uint8_t byte = 0;
    const bool is_byte = token.size() == 6 && token.starts_with("<0x") && token.ends_with('>') &&
                         std::from_chars(&token[3], &token[5], byte, 16).ptr == &token[5];
    return is_byte ? byte : -1;
}

bool is_utf8(const std::string &bytes) {
    try {
        json(bytes).dump();
    } catch (const json::type_error &) {
        return false;
    }
    return true;
}

// Joins the bytes of each run of byte tokens. If a run is not UTF-8, each of its bytes becomes U+FFFD, even bytes that are valid characters.
static std::vector<std::string> join_bytes(const std::vector<std::string> &tokens) {
    std::vector<std::string> out;
    std::string run;
    const auto end_run = [&] {
        if (run.empty()) return;
        if (is_utf8(run)) out.push_back(run);
        else out.insert(out.end(), run.size(), "\uFFFD");
        run.clear();
    };
    for (const std::string &token : tokens) {
        const int byte = byte_of(token);
        if (byte >= 0) run.push_back(char(byte));
        else end_run(), out.push_back(token);
    }
    end_run();
    return out;
}

static std::string joined(const std::vector<std::string> &parts) {
    std::string text;
    for (const std::string &part : parts) text += part;
    return text;
}

static void decode_by(const TokenDecoder &decoder, std::vector<std::string> &tokens) {
    switch (decoder.kind) {
        case TokenDecoder::byte_level:
            for (std::string &token : tokens) token = decode_byte_level(token);
            return;
        case TokenDecoder::byte_fallback: tokens = join_bytes(tokens); return;
        case TokenDecoder::fuse: tokens = {joined(tokens)}; return;
        case TokenDecoder::replace:
            for (std::string &token : tokens) token = replace_all(token, decoder.from, decoder.to);
            return;
        case TokenDecoder::metaspace:  // removes the space that was added at the beginning of the text
            for (std::string &token : tokens) token = replace_all(token, decoder.from, &token == &tokens[0] ? decoder.to : " ");
            return;
        case TokenDecoder::strip:
            for (std::string &token : tokens) token.erase(0, std::min(decoder.most, token.find_first_not_of(' ')));
            return;
    }
}

// ---- Tokenizer

Tokenizer::Tokenizer(const std::string &path) : path_(path) {
    const json tokenizer = read_json(path);
    const Vocabulary vocabulary = read_vocabulary(tokenizer, path);
    read_decoder(decoders_, tokenizer.value("decoder", json()), path);
    for (const auto &[id, entry] : vocabulary) {
        const json normalizer = entry.normalized ? tokenizer.value("normalizer", json()) : json();
        tokens_[int32_t(id)] = {normalised(normalizer, entry.text, path), entry.special};
        if (decode(std::vector{int32_t(id)}, false).size() > max_token_bytes)
            die("%s: decoder makes more than %zu bytes of the token with id %zu\n  fix: use the tokenizer.json of the model itself",
                path.c_str(), max_token_bytes, id);
    }
}

bool Tokenizer::is_byte(int32_t id) const {
    return byte_of(token(id).text) >= 0 && std::ranges::count(decoders_, TokenDecoder::byte_fallback, &TokenDecoder::kind) > 0;
}

const Tokenizer::Token &Tokenizer::token(int32_t id) const {
    const auto found = tokens_.find(id);
    if (found == tokens_.end())
        die("%s: there is no token with id %d; the vocabulary has ids below %zu\n  fix: use the tokenizer.json of the model itself",
            path_.c_str(), id, size());
    return found->second;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
    std::vector<std::string> tokens;
    for (int32_t id : ids)
        if (const Token &t = token(id); !(t.special && skip_special)) tokens.push_back(t.text);
    for (const TokenDecoder &decoder : decoders_) decode_by(decoder, tokens);
    return joined(tokens);
}

// ---- hash

std::string special_token(const std::string &dir, const char *name) {
    const std::string path = dir + "/tokenizer_config.json";
    if (!std::filesystem::exists(path)) return "";
    const json config = read_json(path);
    json token = config.is_object() ? config.value(name, json()) : json();
    if (token.is_object()) token = token.value("content", json());
    return token.is_string() ? token.get<std::string>() : "";
}

std::set<std::string> added_tokens(const std::string &path) {
    std::set<std::string> out;
    for (const json &token : read_json(path).value("added_tokens", json::array()))
        out.insert(token["content"].get<std::string>());
    return out;
}

void add_tokens(const std::string &path, const std::vector<std::string> &tokens, const std::string &to) {
    const Vocabulary vocabulary = read_vocabulary(read_json(path), path);
    std::ifstream file(path);
    auto tokenizer = nlohmann::ordered_json::parse(file);  // in its order
    auto &added = tokenizer["added_tokens"];
    size_t next = vocabulary.rbegin()->first + 1;
    for (const std::string &token : tokens)
        if (std::ranges::none_of(vocabulary, [&](const auto &entry) { return entry.second.text == token; }))
            added.push_back({{"id", next++},
                             {"content", token},
                             {"single_word", false},
                             {"lstrip", false},
                             {"rstrip", false},
                             {"normalized", false},
                             {"special", token.starts_with("<|") && token.ends_with("|>")}});
    write_file(to, tokenizer.dump(1));
}

std::string first_difference(const std::string &path, const std::string &other) {
    const Vocabulary a = read_vocabulary(read_json(path), path), b = read_vocabulary(read_json(other), other);
    const auto named = [](const Vocabulary &in, size_t id) {
        const auto found = in.find(id);
        return found == in.end() ? std::string("no token") : "\"" + found->second.text + "\"";
    };
    for (size_t id = 0; id <= std::max(a.rbegin()->first, b.rbegin()->first); id++)
        if (const std::string one = named(a, id), two = named(b, id); one != two)
            return format("id %zu is %s there and %s here", id, two.c_str(), one.c_str());
    return "";
}

std::string tokenizer_hash(const std::string &path, size_t *size) {
    uint64_t hash = 0xcbf29ce484222325u;
    const Vocabulary vocabulary = read_vocabulary(read_json(path), path);
    if (size) *size = vocabulary.rbegin()->first + 1;
    for (const auto &[id, entry] : vocabulary)
        for (char c : std::to_string(id) + "\t" + entry.text + (entry.special ? "\t1\n" : "\t0\n"))
            hash = (hash ^ uint8_t(c)) * 0x100000001b3u;
    return format("%016llx", (unsigned long long)(hash));
}
