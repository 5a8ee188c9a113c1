// Prepared data: reading a correct file, and the message for every kind of bad file.
#include <cmath>
#include <set>

#include "../llmc/core/hash.h"
#include "../llmc/data/tokens.h"
#include "prepared.h"

static Prepared three_documents() {
    Prepared p;
    p.add({5, 6, 7}, {0, 0, 1});
    p.add({99}, {0});
    p.add({1, 2, 3, 4}, {0, 1, 0, 1});
    return p;
}

// The message for a file that differs from p, which is right, by `change`; "no error" if it is accepted.
template <class Change>
static std::string refusal(const Change &change, Prepared p = three_documents(), size_t vocab = 100,
                           const std::string &hash = "00000000deadbeef") {
    change(p);
    const PreparedFile file(p);
    const auto message = error_of([&] { file.open(vocab, hash); });
    if (message != "no error") expect_contains(message, {file.path, "\n  fix: "});
    return message;
}
static void same(Prepared &) {}

TEST(PreparedData, ReadsBothWidths) {
    for (bool wide : {false, true}) {
        Prepared p = three_documents();
        p.wide = wide, p.tokens[3] = 65535;
        p.metadata["max_len"] = "4";
        const PreparedData data = PreparedFile(p).open(65536, "00000000deadbeef");
        ASSERT_EQ(data.size(), 3u);
        EXPECT_EQ(data.kind(), "sft");
        EXPECT_EQ(data.metadata().at("max_len"), "4");
        EXPECT_EQ(data.total_tokens(), 8u);
        EXPECT_EQ(data.total_targets(), 3u);
        const size_t lengths[] = {3, 1, 4}, targets[] = {1, 0, 2};
        for (size_t i = 0, at = 0; i < 3; at += lengths[i++]) {
            EXPECT_EQ(data.length(i), lengths[i]);
            EXPECT_EQ(data.targets(i), targets[i]);
            const auto [tokens, mask] = data.document(i);
            ASSERT_EQ(tokens.size(), lengths[i]);
            ASSERT_EQ(mask.size(), lengths[i]);
            for (size_t t = 0; t < lengths[i]; t++) {
                EXPECT_EQ(tokens[t], p.tokens[at + t]);
                EXPECT_EQ(mask[t], p.mask[at + t]);
            }
        }
    }
}

static Prepared two_pairs() {
    Prepared p;
    p.metadata["kind"] = "pref";
    p.add({1, 2, 3}, {0, 0, 1}), p.add({1, 2, 4, 5}, {0, 0, 1, 1}), p.add({6, 7}, {0, 1}), p.add({6, 8, 9}, {0, 1, 1});
    return p;
}

TEST(PreparedData, Pairs) {
    Prepared p = two_pairs();
    const PreparedFile file(p);
    const PreparedData data = file.open();
    EXPECT_TRUE(data.pairs());
    EXPECT_EQ(data.size(), 2u);
    EXPECT_EQ(data.documents(), 4u);
    EXPECT_EQ(data.first(1), 2u);
    EXPECT_EQ(data.sample_length(0), 7u);
    EXPECT_EQ(data.sample_length(1), 5u);
    EXPECT_EQ(data.sample_targets(0), 3u);
    EXPECT_EQ(data.targets(3), 2u);
    EXPECT_FALSE(data.has_margins());
    EXPECT_EQ(data.margin(1), 0);
    p.margins = {0.5f, -2};
    file.write(p);
    EXPECT_EQ(file.open().margin(1), -2);
}

TEST(PreparedData, RefusesBrokenPairs) {
    const auto refused = [](auto spoil) { return refusal(spoil, two_pairs()); };
    expect_contains(refused([](Prepared &p) { p.add({1, 2}, {0, 1}); }), {"an odd number of documents, 5"});
    expect_contains(refused([](Prepared &p) { p.margins = {1}; }), {"1 margins for 2 samples"});
    expect_contains(refused([](Prepared &p) { p.margins = {1, NAN}; }), {"margin of pair 1 is not finite"});
    expect_contains(refused([](Prepared &p) { p.mask[8] = 0; }), {"the chosen answer of pair 1 has no token that is a target"});
}

TEST(PreparedData, AChangeOfTheOpenFileIsNoticed) {
    const Prepared right = three_documents();
    Prepared other = right;
    other.tokens[1] = 8, other.tokens[5] = 30000;  // of documents 0 and 2
    other.offsets[1] = 1 << 20;
    const PreparedFile file(right);
    const PreparedData data = file.open();
    file.write(other);  // in place
    for (size_t i : {0, 2})
        expect_error([&] { data.document(i); }, {file.path, format("document %zu has changed", i), "\n  fix: "});
    EXPECT_EQ(data.document(1).tokens, std::vector<int32_t>{99});
    other = right, other.mask[1] = 1;
    file.write(other);
    expect_error([&] { data.document(0); }, {file.path, "document 0 has changed"});
    std::filesystem::resize_file(file.path, 20);
    expect_error([&] { data.document(0); }, {file.path, "ends at byte", "\n  fix: "});
    file.write(right);
    EXPECT_EQ(data.document(2).tokens, (std::vector<int32_t>{1, 2, 3, 4}));
    TemporaryFile renamed("renamed.safetensors");
    renamed.write("something else");
    std::filesystem::rename(renamed.path, file.path);
    EXPECT_EQ(data.document(2).tokens, (std::vector<int32_t>{1, 2, 3, 4}));
}

// The file of data/prepare.py: 3 documents with checksums, of blocks of at least 4 tokens.
static Prepared with_checksums() {
    Prepared p = three_documents();
    const auto checksum = [&](size_t begin, size_t end) {
        const uint64_t tokens = hash_number(&p.tokens[begin], (end - begin) * sizeof(int32_t));
        return (unsigned long long)(hash_number(&p.mask[begin], end - begin, tokens));
    };
    const uint64_t offsets = hash_number(p.offsets.data(), p.offsets.size() * sizeof(int64_t));
    p.metadata["checksums"] = format("4 %016llx %016llx %016llx", (unsigned long long)(offsets), checksum(0, 4), checksum(4, 8));
    return p;
}

TEST(PreparedData, DamageIsNoticed) {
    const auto refused = [](auto damage) { return refusal(damage, with_checksums()); };
    EXPECT_EQ(refused([](Prepared &) {}), "no error");
    expect_contains(refused([](Prepared &p) { p.tokens[1] ^= 1; }),
                    {"documents 0 to 1 are damaged", "\n  fix: copy the file again"});
    expect_contains(refused([](Prepared &p) { p.mask[6] = 1; }), {"documents 2 to 2 are damaged", "(tokens)", "(loss_mask)"});
    expect_contains(refused([](Prepared &p) { p.tokens[7] = 30000; }), {"documents 2 to 2 are damaged"});
    expect_contains(refused([](Prepared &p) { p.offsets[1] = 2; }), {"doc_offsets or margin is damaged"});
    expect_contains(refused([](Prepared &p) { p.add({5}, {0}); }), {"doc_offsets or margin is damaged"});
    for (const char *text : {"", "4", "0 1 2 3", "4 x", "4 1 2 3 -"})
        expect_contains(refused([&](Prepared &p) { p.metadata["checksums"] = text; }), {"damaged", "\n  fix: "});
    expect_contains(refused([&](Prepared &p) { p.metadata["checksums"] += " 1"; }), {"has 3 blocks, and its documents are 2"});
}

TEST(PreparedData, FingerprintIsOfAllContents) {
    const auto fingerprint = [](const Prepared &p) { return PreparedFile(p).open().fingerprint(); };
    const std::string whole = fingerprint(three_documents());
    EXPECT_EQ(fingerprint(with_checksums()), whole);  // a file of an older version has the same contents
    std::set<std::string> all = {whole};
    const auto add = [&](auto change) {
        Prepared p = three_documents();
        change(p);
        all.insert(fingerprint(p));
    };
    add([](Prepared &p) { p.tokens[1] = 7; });
    add([](Prepared &p) { p.mask[6] = 1; });
    add([](Prepared &p) { p.offsets[1] = 2, p.mask[2] = 0; });
    add([](Prepared &p) { p.mask[2] = 0; });
    EXPECT_EQ(all.size(), 5u);
}

TEST(PreparedData, RefusesBrokenOffsets) {
    expect_contains(refusal([](Prepared &p) { p.offsets[0] = 1; }), {"document 0 begins at token 1"});
    expect_contains(refusal([](Prepared &p) { p.offsets[2] = 3; }), {"document 1 begins at token 3 and ends at 3"});
    expect_contains(refusal([](Prepared &p) { p.offsets[1] = 7; }), {"document 1 begins at token 7 and ends at 4"});
    expect_contains(refusal([](Prepared &p) { p.offsets[1] = -2; }), {"document 0 begins at token 0 and ends at -2"});
    expect_contains(refusal([](Prepared &p) { p.offsets[3] = 7; }), {"document 2", "ends at token 7", "8 tokens"});
    expect_contains(refusal([](Prepared &p) { p.offsets[3] = int64_t(1) << 62; }), {"document 2", "8 tokens"});
    expect_contains(refusal([](Prepared &p) { p.offsets = {0}; }), {"no documents"});
    expect_contains(refusal([](Prepared &p) { p.offsets = {}; }), {"no documents"});
    expect_contains(refusal([](Prepared &p) { p = Prepared(); }), {"no documents"});
}

TEST(PreparedData, RefusesBrokenArrays) {
    expect_contains(refusal([](Prepared &p) { p.mask.pop_back(); }), {"8 tokens", "loss_mask of 7"});
    expect_contains(refusal([](Prepared &p) { p.mask[6] = 2; }), {"document 2", "loss_mask 2", "position 2"});
    expect_contains(refusal([](Prepared &p) { p.mask[4] = 1; }), {"document 2", "first token"});
    expect_contains(refusal([](Prepared &p) { p.mask.assign(8, 0); }), {"none of its 8 tokens is a target"});
}

TEST(PreparedData, RefusesOtherVocabularies) {
    expect_contains(refusal(same, three_documents(), 99), {"document 1", "id 99", "vocabulary of 99", "100"});
    expect_contains(refusal([](Prepared &p) { p.wide = true, p.tokens[1] = -1; }), {"document 0", "id -1", "position 1"});
    expect_contains(refusal(same, three_documents(), 100, "0123456789abcdef"),
                    {"another tokenizer", "00000000deadbeef", "0123456789abcdef"});
    EXPECT_EQ(refusal(same, three_documents(), 128), "no error");      // a model's embedding may have rows to spare
    EXPECT_EQ(refusal(same, three_documents(), 100, ""), "no error");  // a model without a tokenizer
    EXPECT_EQ(refusal([](Prepared &p) { p.metadata["tokenizer_hash"] = ""; }), "no error");  // ids that needed none
}

TEST(PreparedData, ChatFormat) {
    Prepared p = three_documents();
    const auto format = [&] { return PreparedFile(p).open().chat_format(); };
    EXPECT_TRUE(format().end_of_turn.empty() && format().chat_template.empty());
    p.metadata["end_of_turn"] = "7,99", p.metadata["chat_template"] = "{{ messages }}";
    EXPECT_EQ(format().end_of_turn, (std::vector<int32_t>{7, 99}));
    EXPECT_EQ(format().chat_template, "{{ messages }}");
    for (const char *wrong : {"100", "-1", "7,", ",7", "7 8", "7,x", "99999999999"}) {
        p.metadata["end_of_turn"] = wrong;
        expect_error(format, {"end_of_turn", wrong, "\n  fix: "});
    }
}

TEST(PreparedData, RefusesOtherFiles) {
    expect_contains(refusal([](Prepared &p) { p.metadata.erase("kind"); }), {"no prepared data", "kind"});
    expect_contains(refusal([](Prepared &p) { p.metadata.erase("vocab_size"); }), {"no prepared data", "vocab_size"});
    expect_contains(refusal([](Prepared &p) { p.metadata["kind"] = "images"; }), {"images"});

    const auto with = [](const std::string &from, const std::string &to) {  // a file with another text
        std::string bytes = three_documents().bytes();
        bytes.replace(bytes.find(from), from.size(), to);
        return bytes;
    };
    const PreparedFile file(three_documents());
    file.write(with("loss_mask", "loss_musk"));
    expect_error([&] { file.open(); }, {file.path, "loss_mask"});
    file.write(with("\"U16\"", "\"F16\""));
    expect_error([&] { file.open(); }, {file.path, "tokens", "F16"});
}

TEST(PreparedData, FirstBadDocumentIsNamedWhateverTheThreads) {
    Prepared p;
    for (int i = 0; i < 1000; i++) p.add({1, 2, i == 700 || i == 300 || i == 999 ? 200 : 3}, {0, 1, 1});
    const PreparedFile file(p);
    expect_error([&] { file.open(); }, {"document 300 "});
}
