// Prepared data: reading a correct file, and the message for each kind of wrong file.
#include <cmath>
#include <functional>
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

static Prepared two_pairs() {
    Prepared p;
    p.metadata["kind"] = "pref";
    p.add({1, 2, 3}, {0, 0, 1}), p.add({1, 2, 4, 5}, {0, 0, 1, 1}), p.add({6, 7}, {0, 1}), p.add({6, 8, 9}, {0, 1, 1});
    return p;
}

// As data/prepare.py writes it, with checksums of blocks of at least 4 tokens.
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

// Expects these words in the message for a changed file; none: the file is accepted.
static void expect_refusal(Prepared p, const std::function<void(Prepared &)> &change, const std::vector<std::string> &words,
                           size_t vocab = 100, const std::string &hash = "00000000deadbeef") {
    change(p);
    const PreparedFile file(p);
    const auto message = error_of([&] { file.open(vocab, hash); });
    expect_contains(message, words);
    if (words.empty()) EXPECT_EQ(message, "no error");
    else expect_contains(message, {file.path, "\n  fix: "});
}
static void same(Prepared &) {}

TEST(PreparedData, ReadsBothWidthsOfIds) {
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
            EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), &p.tokens[at], &p.tokens[at] + lengths[i]));
            EXPECT_TRUE(std::equal(mask.begin(), mask.end(), &p.mask[at], &p.mask[at] + lengths[i]));
        }
    }
}

TEST(PreparedData, ReadsPairs) {
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

TEST(PreparedData, ReadsLabels) {
    Prepared p = two_pairs();
    p.metadata["kind"] = "unpaired", p.labels = {1, 0, 0, 1};
    const PreparedFile file(p);
    const PreparedData data = file.open();
    EXPECT_TRUE(data.judged() && !data.pairs());
    EXPECT_EQ(data.size(), 4u);
    for (size_t i = 0; i < 4; i++) EXPECT_EQ(data.desirable(i), p.labels[i] == 1);
    std::swap(p.labels[0], p.labels[1]);
    EXPECT_NE(PreparedFile(p).open().fingerprint(), data.fingerprint());
    const auto refused = [&](const std::function<void(Prepared &)> &change, const char *words) {
        expect_refusal(p, change, {words});
    };
    refused([](Prepared &p) { p.labels.pop_back(); }, "has 3 labels for 4 documents of kind unpaired");
    refused([](Prepared &p) { p.labels[1] = 0.5f; }, "and each must be 0 or 1");
    refused([](Prepared &p) { p.metadata["kind"] = "sft"; }, "has 4 labels for 4 documents of kind sft");
    refused([](Prepared &p) { p.mask[8] = 0; }, "the answer of document 2 has no token that is a target");
}

TEST(PreparedData, ChangeOfAnOpenFileIsNoticed) {
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
    TemporaryFile renamed("renamed.safetensors");
    renamed.write("something else");
    std::filesystem::rename(renamed.path, file.path);  // the open file continues to exist
    EXPECT_EQ(data.document(2).tokens, (std::vector<int32_t>{1, 2, 3, 4}));
}

TEST(PreparedData, FingerprintDependsOnAllContents) {
    const auto fingerprint = [](const Prepared &p) { return PreparedFile(p).open().fingerprint(); };
    std::set<std::string> all = {fingerprint(three_documents())};
    all.insert(fingerprint(with_checksums()));  // the same contents
    EXPECT_EQ(all.size(), 1u);
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

TEST(PreparedData, DamageIsNoticed) {
    const auto refused = [](const std::function<void(Prepared &)> &damage, const std::vector<std::string> &words) {
        expect_refusal(with_checksums(), damage, words);
    };
    refused(same, {});
    refused([](Prepared &p) { p.tokens[1] ^= 1; }, {"documents 0 to 1 are damaged", "\n  fix: copy the file again"});
    refused([](Prepared &p) { p.mask[6] = 1; }, {"documents 2 to 2 are damaged", "(tokens)", "(loss_mask)"});
    refused([](Prepared &p) { p.tokens[7] = 30000; }, {"documents 2 to 2 are damaged"});
    refused([](Prepared &p) { p.offsets[1] = 2; }, {"doc_offsets, margin or label is damaged"});
    refused([](Prepared &p) { p.add({5}, {0}); }, {"doc_offsets, margin or label is damaged"});
    for (const char *text : {"", "4", "0 1 2 3", "4 x", "4 1 2 3 -"})
        refused([&](Prepared &p) { p.metadata["checksums"] = text; }, {"damaged"});
    refused([&](Prepared &p) { p.metadata["checksums"] += " 1"; }, {"has 3 blocks, and its documents are 2"});
}

TEST(PreparedData, WrongContentsAreRefused) {
    const auto refused = [](const std::function<void(Prepared &)> &change, const std::vector<std::string> &words) {
        expect_refusal(three_documents(), change, words);
    };
    refused([](Prepared &p) { p.offsets[0] = 1; }, {"document 0 begins at token 1"});
    refused([](Prepared &p) { p.offsets[2] = 3; }, {"document 1 begins at token 3 and ends at 3"});
    refused([](Prepared &p) { p.offsets[1] = 7; }, {"document 1 begins at token 7 and ends at 4"});
    refused([](Prepared &p) { p.offsets[1] = -2; }, {"document 0 begins at token 0 and ends at -2"});
    refused([](Prepared &p) { p.offsets[3] = 7; }, {"document 2", "ends at token 7", "8 tokens"});
    refused([](Prepared &p) { p.offsets[3] = int64_t(1) << 62; }, {"document 2", "8 tokens"});
    refused([](Prepared &p) { p.offsets = {}; }, {"no documents"});
    refused([](Prepared &p) { p = Prepared(); }, {"no documents"});
    refused([](Prepared &p) { p.mask.pop_back(); }, {"8 tokens", "loss_mask of 7"});
    refused([](Prepared &p) { p.mask[6] = 2; }, {"document 2", "loss_mask 2", "position 2"});
    refused([](Prepared &p) { p.mask[4] = 1; }, {"document 2", "first token"});
    refused([](Prepared &p) { p.mask.assign(8, 0); }, {"none of its 8 tokens is a target"});
    refused([](Prepared &p) { p.wide = true, p.tokens[1] = -1; }, {"document 0", "id -1", "position 1"});
    refused([](Prepared &p) { p.metadata.erase("kind"); }, {"not prepared data", "kind"});
    refused([](Prepared &p) { p.metadata.erase("vocab_size"); }, {"not prepared data", "vocab_size"});
    refused([](Prepared &p) { p.metadata["kind"] = "images"; }, {"images"});
    const auto pair = [](const std::function<void(Prepared &)> &change, const char *words) {
        expect_refusal(two_pairs(), change, {words});
    };
    pair([](Prepared &p) { p.add({1, 2}, {0, 1}); }, "an odd number of documents, 5");
    pair([](Prepared &p) { p.margins = {1}; }, "1 margins for 2 samples");
    pair([](Prepared &p) { p.margins = {1, NAN}; }, "margin of pair 1 is not finite");
    pair([](Prepared &p) { p.mask[8] = 0; }, "the chosen answer of pair 1 has no token that is a target");
    const std::pair<std::string, std::string> texts[] = {{"loss_mask", "loss_musk"}, {"\"U16\"", "\"F16\""}};
    for (const auto &[from, to] : texts) {
        std::string bytes = three_documents().bytes();
        const PreparedFile file(three_documents());
        file.write(bytes.replace(bytes.find(from), from.size(), to));
        expect_error([&] { file.open(); }, {file.path, from == "loss_mask" ? from : "F16"});
    }
    Prepared many;
    for (int i = 0; i < 1000; i++) many.add({1, 2, i == 700 || i == 300 || i == 999 ? 200 : 3}, {0, 1, 1});
    expect_refusal(many, same, {"document 300 "});  // the first one, with any number of threads
}

TEST(PreparedData, VocabularyAndTokenizerAreTheModels) {
    expect_refusal(three_documents(), same, {"document 1", "id 99", "vocabulary of 99", "100"}, 99);
    expect_refusal(three_documents(), same, {"another tokenizer", "00000000deadbeef", "0123456789abcdef"}, 100,
                   "0123456789abcdef");
    expect_refusal(three_documents(), same, {}, 128);      // a model's embedding may have unused rows
    expect_refusal(three_documents(), same, {}, 100, "");  // a model without a tokenizer
    expect_refusal(three_documents(), [](Prepared &p) { p.metadata["tokenizer_hash"] = ""; },
                   {});  // ids made without a tokenizer
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
