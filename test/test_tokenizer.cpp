// Hand-made tokenizers of both kinds: the text of ids, the hash, and the messages for malformed files.
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

// test_decoding.py compares more texts with the package tokenizers.
TEST_F(TokenizerTest, DecodesBothKinds) {
    const struct {
        json tokenizer;
        std::vector<int32_t> ids;
        std::string text, with_special;
    } rows[] = {
        {byte_level(), {0, 1, 2}, "Hello world\n", "Hello world\n"},
        {byte_level(), {3, 4, 3}, "\xC3\xA9\xC3", "\xC3\xA9\xC3"},  // the last character is incomplete
        {byte_level(), {6, 0, 7, 6}, "H<think>", "<|end|>H<think><|end|>"},
        {byte_level(), {9}, "a b", "a b"},  // a token with a character that stands for no byte is text
        {byte_level(), {}, "", ""},
        {sentencepiece(), {1, 2, 2}, "Hello Hello", "<s> Hello Hello"},
        {sentencepiece(), {7, 6, 8, 7}, "\uFFFD\uFFFD\xC3\xA9\n", "\uFFFD\uFFFD\xC3\xA9\n"},  // bytes that are no UTF-8
        {sentencepiece(), {5, 1, 6}, "\xC3\xA9", "\uFFFD<s>\uFFFD"},  // a special token between the bytes of a character
    };
    for (const auto &[tokenizer, ids, text, with_special] : rows) {
        EXPECT_EQ(make(tokenizer).decode(ids), text);
        EXPECT_EQ(make(tokenizer).decode(ids, false), with_special);
    }
    const Tokenizer bytes = make(byte_level()), pieces = make(sentencepiece());
    EXPECT_EQ(bytes.size(), 10u);
    EXPECT_TRUE(bytes.is_special(6) && !bytes.is_special(7));
    EXPECT_TRUE(pieces.is_byte(6) && !pieces.is_byte(8) && !pieces.is_byte(9));
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
    for (int32_t b = 0; b < 256; b++) EXPECT_EQ(t.decode(std::vector<int32_t>{b}), std::string(1, char(b)));
}

TEST_F(TokenizerTest, RefusesIdsWithoutToken) {
    json gap = byte_level();
    gap["model"]["vocab"].erase("Ń");
    const Tokenizer t = make(gap);
    for (int32_t id : {5, 10, -1, INT32_MAX})
        expect_error([&] { t.decode(std::vector<int32_t>{0, id}); }, {file.path, format("id %d;", id), "below 10", "\n  fix: "});
}

TEST_F(TokenizerTest, HashDependsOnIdsTokensAndSpecial) {
    // FNV-1a of "0\tb\t0\n1\ta\t0\n2\t<s>\t1\n"
    const json small = json::parse(R"({"model": {"vocab": {"a": 1, "b": 0, "<s>": 2}},
                                       "added_tokens": [{"id": 2, "content": "<s>", "special": true}]})");
    EXPECT_EQ(hash(small), "5eaab60acd283fc1");

    const std::string base = hash(byte_level());
    json other = byte_level();
    other["model"]["merges"] = {"H e"};
    other["decoder"] = nullptr;
    other["model"]["vocab"]["<|end|>"] = 6;  // some files also list an added token in the vocabulary
    EXPECT_EQ(hash(other), base);
    for (const char *patch : {R"({"model": {"vocab": {"H": 1, "ello": 0}}})", R"({"model": {"vocab": {"x": 10}}})",
                              R"({"added_tokens": [{"id": 6, "content": "<|end|>", "special": false}]})",
                              R"({"added_tokens": [{"id": 6, "content": "<|End|>", "special": true}]})"}) {
        other = byte_level();
        other.merge_patch(json::parse(patch));
        EXPECT_NE(hash(other), base) << patch;
    }
}

TEST_F(TokenizerTest, RefusesMalformedFiles) {
    for (const char *text : {"", "{\"model\": "}) expect_refusal(text, {});
    expect_refusal("[]", {"must be an object"});
    expect_refusal("{}", {"model"});
    json doubles = json::parse(R"({"type": "Sequence", "decoders": []})");
    for (int i = 0; i < 20; i++)
        doubles["decoders"].push_back(json::parse(R"({"type": "Replace", "pattern": {"String": "l"}, "content": "ll"})"));
    const std::pair<std::string, std::vector<std::string>> patches[] = {
        // null removes a key
        {R"({"decoder": null})", {"decoder"}},
        {R"({"decoder": {"type": "WordPiece"}})", {"WordPiece", "is not known"}},
        {R"({"decoder": {"type": "Sequence"}})", {"decoder.decoders"}},
        {R"({"decoder": {"type": "Replace", "content": " ", "pattern": "x"}})", {"decoder.pattern"}},
        {R"({"decoder": {"type": "Strip", "content": " ", "start": -1, "stop": 0}})", {"decoder.start", "-1"}},
        {R"({"decoder": {"type": "Strip", "content": " ", "start": 1, "stop": 1}})", {"Strip", "is not known"}},
        {json({{"decoder", doubles}}).dump(), {"65536 bytes", "id 1", "fix"}},
        {R"({"model": {"vocab": null}})", {"model.vocab"}},
        {R"({"model": {"vocab": [["a", -1.5]]}})", {"model.vocab", "byte-pair encoding"}},
        {R"({"model": {"vocab": {"H": -1}}})", {"\"H\"", "-1"}},
        {R"({"model": {"vocab": {"H": 1.5}}})", {"\"H\"", "1.5"}},
        {R"({"model": {"vocab": {"H": 9223372036854775808}}})", {"\"H\"", "9223372036854775808"}},
        {R"({"model": {"vocab": {"H": 16777216}}})", {"\"H\"", "16777216"}},
        {R"({"model": {"vocab": {"H": 1}}})", {"id 1 to both"}},
        {R"({"added_tokens": [{"id": "6", "content": "<s>", "special": true}]})", {"added_tokens", "<s>", "\"6\""}},
        {R"({"added_tokens": [{"content": "<s>", "special": true}]})", {"added_tokens", "<s>", "null"}},
        {R"({"added_tokens": [{"id": 6, "content": "<s>"}]})", {"added_tokens.special"}},
        {R"({"added_tokens": "none"})", {"added_tokens"}},
    };
    for (const auto &[patch, parts] : patches) {
        json tokenizer = byte_level();
        tokenizer.merge_patch(json::parse(patch));
        expect_refusal(tokenizer.dump(), parts);
    }
    json empty = byte_level();
    empty["added_tokens"] = json::array(), empty["model"]["vocab"] = json::object();
    expect_refusal(empty.dump(), {"is empty"});
    EXPECT_THROW(Tokenizer(file.path + ".absent"), Error);
    EXPECT_THROW(tokenizer_hash(file.path + ".absent"), Error);
}
