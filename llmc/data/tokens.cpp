#include "tokens.h"

#include <algorithm>
#include <cmath>

#include "../core/common.h"
#include "../core/hash.h"

constexpr const char *prepare_again = "prepare it again with data/prepare.py";

PreparedData::PreparedData(const std::string &path, size_t vocab, const std::string &tokenizer_hash) : file_(path) {
    check_metadata(tokenizer_hash);
    pairs_ = kind() == "pref";
    read_arrays();
    check_offsets();
    check_documents(vocab);
}

static size_t size_of(const SafetensorsFile &file, const char *name) { return elements(file.at(name).shape); }

Document PreparedData::read_document(size_t i) const {
    const size_t begin = size_t(offsets_[i]), n = length(i);
    Document document{{}, file_.array_part<uint8_t>("loss_mask", begin, n)};
    if (file_.at("tokens").dtype == "I32") {
        document.tokens = file_.array_part<int32_t>("tokens", begin, n);
    } else {
        const auto narrow = file_.array_part<uint16_t>("tokens", begin, n);
        document.tokens.assign(narrow.begin(), narrow.end());
    }
    return document;
}

static uint64_t checksum(const Document &document) {
    const uint64_t tokens = hash_number(document.tokens.data(), document.tokens.size() * sizeof(int32_t));
    return hash_number(document.mask.data(), document.mask.size(), tokens);
}

Document PreparedData::document(size_t i) const {
    Document document = read_document(i);
    if (checksum(document) != checksums_[i])
        die("%s: document %zu has changed since the run began\n  fix: put the file back as it was and --resume auto; write changed data "
            "to another file",
            path().c_str(), i);
    return document;
}

void PreparedData::check_metadata(const std::string &tokenizer_hash) const {
    for (const char *key : {"kind", "vocab_size"})
        if (!metadata().contains(key))
            die("%s: this is no prepared data: its metadata has no \"%s\"\n  fix: %s", path().c_str(), key, prepare_again);
    if (kind() != "pretrain" && kind() != "sft" && kind() != "pref" && kind() != "prompts")
        die("%s: kind of data \"%s\" is not known; \"pretrain\", \"sft\", \"pref\" and \"prompts\" are\n  fix: %s",
            path().c_str(), kind().c_str(), prepare_again);
    const auto hash = metadata().find("tokenizer_hash");
    if (hash != metadata().end() && !hash->second.empty() && !tokenizer_hash.empty() && hash->second != tokenizer_hash)
        die("%s: was made with another tokenizer than the model's (tokenizer_hash %s, the model's is %s)\n"
            "  fix: %s and the model's directory as --tokenizer",
            path().c_str(), hash->second.c_str(), tokenizer_hash.c_str(), prepare_again);
}

void PreparedData::read_arrays() {
    const auto &tensors = file_.tensors();
    for (const char *name : {"tokens", "loss_mask", "doc_offsets"})
        if (!tensors.contains(name))
            die("%s: this is no prepared data: there is no array \"%s\"\n  fix: %s", path().c_str(), name, prepare_again);
    offsets_ = file_.array<int64_t>("doc_offsets");
    if (tensors.contains("margin")) margins_ = file_.array<float>("margin");
    const size_t tokens = size_of(file_, "tokens"), mask = size_of(file_, "loss_mask");
    if (mask != tokens) die("%s: has %zu tokens but a loss_mask of %zu\n  fix: %s", path().c_str(), tokens, mask, prepare_again);
}

void PreparedData::check_offsets() const {
    const size_t tokens = size_of(file_, "tokens");
    if (offsets_.size() < 2) die("%s: holds no documents\n  fix: %s from input with text in it", path().c_str(), prepare_again);
    if (offsets_[0] != 0)
        die("%s: document 0 begins at token %lld instead of 0\n  fix: %s", path().c_str(), (long long)(offsets_[0]),
            prepare_again);
    if (pairs() && documents() % 2)
        die("%s: holds pairs, but an odd number of documents, %zu\n  fix: %s", path().c_str(), documents(), prepare_again);
    if (has_margins() && (!pairs() || margins_.size() != size()))
        die("%s: has %zu margins for %zu samples of kind %s\n  fix: %s", path().c_str(), margins_.size(), size(), kind().c_str(),
            prepare_again);
    for (size_t i = 0; i < margins_.size(); i++)
        if (!std::isfinite(margins_[i]))
            die("%s: the margin of pair %zu is not finite\n  fix: %s", path().c_str(), i, prepare_again);
    for (size_t i = 0; i + 1 < offsets_.size(); i++)
        if (offsets_[i + 1] <= offsets_[i])
            die("%s: document %zu begins at token %lld and ends at %lld; each must hold at least one token\n  fix: %s",
                path().c_str(), i, (long long)(offsets_[i]), (long long)(offsets_[i + 1]), prepare_again);
    if (size_t(offsets_.back()) != tokens)
        die("%s: document %zu, the last, ends at token %lld but the file has %zu tokens\n  fix: %s", path().c_str(),
            documents() - 1, (long long)(offsets_.back()), tokens, prepare_again);
}

// Reads each document once, ids and mask together. If one is bad, refuse_document finds out afterwards what is wrong with the first.
void PreparedData::check_documents(size_t vocab) {
    targets_.resize(documents()), checksums_.resize(documents());
    size_t total = 0, first_bad = documents();
#pragma omp parallel for schedule(dynamic, 16) reduction(+ : total) reduction(min : first_bad)
    for (size_t i = 0; i < documents(); i++) {
        try {
            const Document document = read_document(i);
            const auto &[ids, mask] = document;
            size_t targets = 0;
            bool bad = mask[0] != 0;
            for (size_t t = 0; t < ids.size(); t++) {
                bad |= uint32_t(ids[t]) >= vocab || mask[t] > 1;  // a negative id is a large one
                targets += mask[t];
            }
            if (bad) first_bad = std::min(first_bad, i);
            targets_[i] = targets;
            checksums_[i] = checksum(document);
            total += targets;
        } catch (const Error &) {  // no exception may leave a parallel loop
            first_bad = std::min(first_bad, i);
        }
    }
    if (first_bad < documents()) refuse_document(first_bad, vocab);
    if (total == 0 && kind() != "prompts")
        die("%s: none of its %zu tokens is a target, so there is nothing to learn\n"
            "  fix: %s and see what it says about targets",
            path().c_str(), total_tokens(), prepare_again);
    for (size_t i = 0; pairs() && i < documents(); i++)
        if (targets_[i] == 0)
            die("%s: the %s answer of pair %zu has no token that is a target\n  fix: %s", path().c_str(),
                i % 2 ? "rejected" : "chosen", i / 2, prepare_again);
}

void PreparedData::refuse_document(size_t i, size_t vocab) const {
    const auto [ids, mask] = read_document(i);
    for (size_t t = 0; t < ids.size(); t++) {
        if (uint32_t(ids[t]) >= vocab)
            die("%s: document %zu has token id %d at position %zu, but the model has a vocabulary of %zu "
                "(the data was made for one of %s)\n  fix: %s and the model's directory as --tokenizer",
                path().c_str(), i, ids[t], t, vocab, metadata().at("vocab_size").c_str(), prepare_again);
        if (mask[t] > 1)
            die("%s: document %zu has loss_mask %d at position %zu; only 0 and 1 are allowed\n  fix: %s", path().c_str(), i,
                mask[t], t, prepare_again);
    }
    die("%s: document %zu has loss_mask 1 on its first token, which nothing comes before to predict it from\n  fix: %s",
        path().c_str(), i, prepare_again);
}
