// Tokenizers made by hand, of both kinds: ids to bytes, the hash, and the message for every malformed file.
#include <nlohmann/json.hpp>

#include "../llmc/data/tokenizer.h"
#include "errors.h"

using json = nlohmann::json;

static json byte_level() {
    return json::parse(R"({
        "added_tokens": [{"id": 6, "content": "<|end|>", "special": true}, {"id": 7, "content": "<think>", "special": false},
                         {"id": 9, "content": "a b", "special": false}],
        "decoder": {"type": "ByteLevel", "add_prefix_space": true},
        "model": {"type": "BPE", "merges": [],
                  "vocab": {"H": 0, "ello": 1, "ĠworldĊ": 2, "Ã": 3, "©": 4, "Ń": 5, "ĀġĢł": 8}}})");
}

static json sentencepiece() {
    return json::parse(R"({
        "added_tokens": [{"id": 0, "content": "<unk>", "special": true}, {"id": 1, "content": "<s>", "special": true}],
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "merges": [],
                  "vocab": {"<unk>": 0, "<s>": 1, "▁Hello": 2, "▁": 3, "▁▁b": 4, "<0xC3>": 5, "<0xa9>": 6, "<0x0A>": 7,
                            "é": 8, "<0xZZ>": 9}}})");
}

struct TokenizerTest : testing::Test {
    TemporaryFile file{"tokenizer.json"};

    Tokenizer make(const json &tokenizer) const {
        file.write(tokenizer.dump());
        return Tokenizer(file.path);
    }
    std::string hash(const json &tokenizer) const {
        file.write(tokenizer.dump());
        return tokenizer_hash(file.path);
    }
    void expect_refusal(const std::string &text, const std::vector<std::string> &parts) const {
        file.write(text);
        const auto message = error_of([&] { Tokenizer(file.path); });
        expect_contains(message, {file.path});
        expect_contains(message, parts);
    }
};

static std::string decode(const Tokenizer &t, const std::vector<int32_t> &ids, bool skip_special = true) {
    return t.decode(ids, skip_special);
}

TEST_F(TokenizerTest, ByteLevel) {
    const Tokenizer t = make(byte_level());
    EXPECT_EQ(t.size(), 10u);
    EXPECT_EQ(decode(t, {0, 1, 2}), "Hello world\n");
    EXPECT_EQ(decode(t, {2}), " world\n");  // nothing is stripped
    EXPECT_EQ(decode(t, {3, 4}), "\xC3\xA9");
    EXPECT_EQ(decode(t, {3}), "\xC3");  // half a character stays half
    EXPECT_EQ(decode(t, {5}), "\xAD");  // the last of the 68 bytes without a character of their own
    EXPECT_EQ(decode(t, {8}), std::string("\0\x7F\x80\xA0", 4));
    EXPECT_EQ(decode(t, {6, 0, 7, 6}), "H<think>");
    EXPECT_EQ(decode(t, {6, 0, 7}, false), "<|end|>H<think>");
    EXPECT_EQ(decode(t, {9}), "a b");  // a token with a character that stands for no byte is decoded to its own text
    EXPECT_EQ(decode(t, {}), "");
    EXPECT_TRUE(t.is_special(6));
    EXPECT_FALSE(t.is_special(7));
}

TEST_F(TokenizerTest, EveryByteHasACharacter) {
    json tokenizer = byte_level();
    tokenizer["model"]["vocab"] = json::object();
    tokenizer["added_tokens"] = json::array();
    for (int b = 0, next = 256; b < 256; b++) {
        const int point = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174 ? b : next++;
        const std::string text =
            point < 128 ? std::string(1, char(point)) : std::string{char(0xC0 | point >> 6), char(0x80 | (point & 63))};
        tokenizer["model"]["vocab"][text] = b;
    }
    const Tokenizer t = make(tokenizer);
    ASSERT_EQ(t.size(), 256u);
    for (int32_t b = 0; b < 256; b++) EXPECT_EQ(decode(t, {b}), std::string(1, char(b)));
}

TEST_F(TokenizerTest, SentencePiece) {
    const Tokenizer t = make(sentencepiece());
    EXPECT_EQ(decode(t, {1, 2, 2}), "Hello Hello");
    EXPECT_EQ(decode(t, {1, 2}, false), "<s> Hello");
    EXPECT_EQ(decode(t, {3, 4}), "  b");  // one space of three
    EXPECT_EQ(decode(t, {5, 6, 7, 8}), "\xC3\xA9\n\xC3\xA9");
    EXPECT_EQ(decode(t, {9}), "<0xZZ>");
}

// A run of bytes that is not UTF-8 as a whole is one U+FFFD a byte, also with a special token between its bytes.
TEST_F(TokenizerTest, RunsOfBytes) {
    const std::string unknown = "\uFFFD";
    const Tokenizer t = make(sentencepiece());
    EXPECT_EQ(decode(t, {5, 6, 5}), unknown + unknown + unknown);
    EXPECT_EQ(decode(t, {7, 6, 8, 7}), unknown + unknown + "\xC3\xA9\n");
    EXPECT_EQ(decode(t, {5, 1, 6}), "\xC3\xA9");
    EXPECT_EQ(decode(t, {5, 1, 6}, false), unknown + "<s>" + unknown);
    EXPECT_TRUE(t.is_byte(6) && !t.is_byte(8) && !t.is_byte(9));
}

TEST_F(TokenizerTest, Metaspace) {
    const auto text = [&](const char *decoder) {
        json tokenizer = sentencepiece();
        tokenizer["decoder"] = json::parse(decoder);
        return decode(make(tokenizer), {4, 2, 4, 5});
    };
    EXPECT_EQ(text(R"({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"})"), "b Hello  b<0xC3>");
    EXPECT_EQ(text(R"({"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": true})"), "b Hello  b<0xC3>");
    EXPECT_EQ(text(R"({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never"})"), "  b Hello  b<0xC3>");
    EXPECT_EQ(text(R"({"type": "Metaspace", "replacement": "l", "prepend_scheme": "first"})"),
              "\u2581\u2581b\u2581He  o\u2581\u2581b<0xC3>");
}

TEST_F(TokenizerTest, RefusesIdsWithoutToken) {
    json gap = byte_level();
    gap["model"]["vocab"].erase("Ń");
    const Tokenizer t = make(gap);
    for (int32_t id : {5, 10, -1, INT32_MAX})
        expect_error([&] { decode(t, {0, id}); }, {file.path, format("id %d;", id), "below 10", "\n  fix: "});
}

TEST_F(TokenizerTest, HashMeansIdsTokensAndSpecial) {
    // FNV-1a of "0\tb\t0\n1\ta\t0\n2\t<s>\t1\n"
    const json small = json::parse(R"({"model": {"vocab": {"a": 1, "b": 0, "<s>": 2}},
                                       "added_tokens": [{"id": 2, "content": "<s>", "special": true}]})");
    EXPECT_EQ(hash(small), "5eaab60acd283fc1");

    const std::string base = hash(byte_level());
    json other = byte_level();
    other["model"]["merges"] = {"H e"};
    other["decoder"] = nullptr;
    EXPECT_EQ(hash(other), base);  // says nothing about ids
    other["model"]["vocab"]["<|end|>"] = 6;
    EXPECT_EQ(hash(other), base);  // some files list an added token in the vocabulary too
    for (const char *patch : {R"({"model": {"vocab": {"H": 1, "ello": 0}}})", R"({"model": {"vocab": {"x": 10}}})",
                              R"({"added_tokens": [{"id": 6, "content": "<|end|>", "special": false}]})",
                              R"({"added_tokens": [{"id": 6, "content": "<|End|>", "special": true}]})"}) {
        other = byte_level();
        other.merge_patch(json::parse(patch));
        EXPECT_NE(hash(other), base) << patch;
    }
}

TEST_F(TokenizerTest, RefusesMalformedFiles) {
    expect_refusal("", {});
    expect_refusal("{\"model\": ", {});
    expect_refusal("[]", {"must be an object"});
    expect_refusal("{}", {"model"});
    const auto expect_refusal_of = [&](const char *patch, const std::vector<std::string> &parts) {
        json tokenizer = byte_level();
        tokenizer.merge_patch(json::parse(patch));  // null removes a key
        expect_refusal(tokenizer.dump(), parts);
    };
    expect_refusal_of(R"({"decoder": null})", {"decoder"});
    expect_refusal_of(R"({"decoder": {"type": "WordPiece"}})", {"WordPiece", "is not known"});
    expect_refusal_of(R"({"decoder": {"type": "Sequence"}})", {"decoder.decoders"});
    expect_refusal_of(R"({"decoder": {"type": "Replace", "content": " ", "pattern": "x"}})", {"decoder.pattern"});
    expect_refusal_of(R"({"decoder": {"type": "Strip", "content": " ", "start": -1, "stop": 0}})", {"decoder.start", "-1"});
    expect_refusal_of(R"({"decoder": {"type": "Strip", "content": " ", "start": 1, "stop": 1}})", {"Strip", "is not known"});
    json doubles = json::parse(R"({"type": "Sequence", "decoders": []})");
    for (int i = 0; i < 20; i++)
        doubles["decoders"].push_back(json::parse(R"({"type": "Replace", "pattern": {"String": "l"}, "content": "ll"})"));
    expect_refusal_of(json({{"decoder", doubles}}).dump().c_str(), {"65536 bytes", "id 1", "fix"});
    expect_refusal_of(R"({"model": {"vocab": null}})", {"model.vocab"});
    expect_refusal_of(R"({"model": {"vocab": [["a", -1.5]]}})", {"model.vocab", "byte-pair encoding"});
    expect_refusal_of(R"({"model": {"vocab": {"H": -1}}})", {"\"H\"", "-1"});
    expect_refusal_of(R"({"model": {"vocab": {"H": 1.5}}})", {"\"H\"", "1.5"});
    expect_refusal_of(R"({"model": {"vocab": {"H": 9223372036854775808}}})", {"\"H\"", "9223372036854775808"});
    expect_refusal_of(R"({"model": {"vocab": {"H": 16777216}}})", {"\"H\"", "16777216"});
    expect_refusal_of(R"({"model": {"vocab": {"H": 1}}})", {"id 1 to both"});
    expect_refusal_of(R"({"added_tokens": [{"id": "6", "content": "<s>", "special": true}]})", {"added_tokens", "<s>", "\"6\""});
    expect_refusal_of(R"({"added_tokens": [{"content": "<s>", "special": true}]})", {"added_tokens", "<s>", "null"});
    expect_refusal_of(R"({"added_tokens": [{"id": 6, "content": "<s>"}]})", {"added_tokens.special"});
    expect_refusal_of(R"({"added_tokens": "none"})", {"added_tokens"});
    json empty = byte_level();
    empty["added_tokens"] = json::array();
    empty["model"]["vocab"] = json::object();
    expect_refusal(empty.dump(), {"is empty"});
    EXPECT_THROW(Tokenizer(file.path + ".absent"), Error);
    EXPECT_THROW(tokenizer_hash(file.path + ".absent"), Error);
}
