#include "tokens.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>
#include <sstream>

#include "../core/common.h"
#include "../core/hash.h"

constexpr const char *prepare_again = "prepare it again with data/prepare.py";

PreparedData::PreparedData(const std::string &path, size_t vocab, const std::string &tokenizer_hash) : file_(path) {
    check_metadata(tokenizer_hash);
    read_chat_format(vocab);
    pairs_ = kind() == "pref";
    read_arrays();
    read_checksums();
    check_offsets();
    check_documents(vocab);
}

static size_t size_of(const SafetensorsFile &file, const char *name) { return elements(file.at(name).shape); }

Document PreparedData::read_tokens(size_t begin, size_t n) const {
    Document out{{}, file_.array_part<uint8_t>("loss_mask", begin, n)};
    if (file_.at("tokens").dtype == "I32") {
        out.tokens = file_.array_part<int32_t>("tokens", begin, n);
    } else {
        const auto narrow = file_.array_part<uint16_t>("tokens", begin, n);
        out.tokens.assign(narrow.begin(), narrow.end());
    }
    return out;
}

// Returns the checksum of a document, or of several consecutive ones.
static uint64_t checksum(std::span<const int32_t> tokens, std::span<const uint8_t> mask) {
    return hash_number(mask.data(), mask.size(), hash_number(tokens.data(), tokens.size_bytes()));
}

Document PreparedData::document(size_t i) const {
    Document document = read_document(i);
    if (checksum(document.tokens, document.mask) != checksums_[i])
        die("%s: document %zu has changed since the run began\n  fix: put the file back as it was and --resume auto; write changed data "
            "to another file",
            path().c_str(), i);
    return document;
}

uint64_t PreparedData::checksum_of_arrays() const {
    const uint64_t offsets = hash_number(offsets_.data(), offsets_.size() * sizeof(int64_t));
    if (!labels_.empty()) return hash_number(labels_.data(), labels_.size() * sizeof(float), offsets);
    if (!margins_.empty()) return hash_number(margins_.data(), margins_.size() * sizeof(float), offsets);
    if (column_offsets_.empty()) return offsets;
    return hash_number(columns_.data(), columns_.size(),
                       hash_number(column_offsets_.data(), column_offsets_.size() * sizeof(int64_t), offsets));
}

std::string PreparedData::fingerprint() const {
    const uint64_t all = hash_number(checksums_.data(), checksums_.size() * sizeof(uint64_t), checksum_of_arrays());
    return format("%zu-%016llx", size_t(offsets_.back()), (unsigned long long)(all));
}

std::string PreparedData::columns(size_t s) const {
    if (column_offsets_.empty()) return "{}";
    return {columns_.begin() + column_offsets_[s], columns_.begin() + column_offsets_[s + 1]};
}

std::string PreparedData::name() const {
    const auto source = metadata().find("source");
    return source == metadata().end() ? path() : source->second + " (prepared: " + path() + ")";
}

void PreparedData::check_metadata(const std::string &tokenizer_hash) const {
    for (const char *key : {"kind", "vocab_size"})
        if (!metadata().contains(key))
            die("%s: this is not prepared data: its metadata has no \"%s\"\n  fix: %s", path().c_str(), key, prepare_again);
    if (kind() != "pretrain" && kind() != "sft" && kind() != "pref" && kind() != "unpaired" && kind() != "rl" &&
        kind() != "prompts")
        die("%s: kind of data \"%s\" is not known; \"pretrain\", \"sft\", \"pref\", \"unpaired\", \"rl\" and \"prompts\" are\n  fix: %s",
            path().c_str(), kind().c_str(), prepare_again);
    const auto hash = metadata().find("tokenizer_hash");
    if (hash != metadata().end() && !hash->second.empty() && !tokenizer_hash.empty() && hash->second != tokenizer_hash)
        die("%s: was made with another tokenizer than the model's (tokenizer_hash %s, the model's is %s)\n"
            "  fix: %s and the model's directory as --tokenizer",
            path().c_str(), hash->second.c_str(), tokenizer_hash.c_str(), prepare_again);
}

void PreparedData::read_chat_format(size_t vocab) {
    const auto text = [&](const char *key) { return metadata().contains(key) ? metadata().at(key) : ""; };
    chat_format_.chat_template = text("chat_template");
    chat_format_.read_as = text("read_as");
    const std::string ends = text("end_of_turn");
    for (const char *at = ends.data(), *const end = at + ends.size(); !ends.empty() && at <= end;) {
        int32_t id = -1;
        const auto [next, error] = std::from_chars(at, end, id);
        if (error != std::errc() || id < 0 || size_t(id) >= vocab || (next < end && *next != ','))
            die("%s: its end_of_turn is \"%s\", and not ids of the model's %zu tokens with commas between\n  fix: %s",
                path().c_str(), ends.c_str(), vocab, prepare_again);
        chat_format_.end_of_turn.push_back(id);
        at = next + 1;
    }
}

void PreparedData::read_arrays() {
    const auto &tensors = file_.tensors();
    for (const char *name : {"tokens", "loss_mask", "doc_offsets"})
        if (!tensors.contains(name))
            die("%s: this is no prepared data: there is no array \"%s\"\n  fix: %s", path().c_str(), name, prepare_again);
    offsets_ = file_.array<int64_t>("doc_offsets");
    if (tensors.contains("margin")) margins_ = file_.array<float>("margin");
    if (tensors.contains("label")) labels_ = file_.array<float>("label");
    if (tensors.contains("columns"))
        columns_ = file_.array<uint8_t>("columns"), column_offsets_ = file_.array<int64_t>("column_offsets");
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
    if (labels_.size() != (judged() ? documents() : 0) || std::ranges::any_of(labels_, [](float l) { return l != 0 && l != 1; }))
        die("%s: has %zu labels for %zu documents of kind %s, and each must be 0 or 1\n  fix: %s", path().c_str(), labels_.size(),
            documents(), kind().c_str(), prepare_again);
    const auto &columns = column_offsets_;
    if (!columns.empty() && (pairs() || columns.size() != offsets_.size() || columns[0] != 0 ||
                             !std::ranges::is_sorted(columns) || size_t(columns.back()) > columns_.size()))
        die("%s: its column_offsets do not divide the array columns into one text for each of %zu documents\n  fix: %s",
            path().c_str(), documents(), prepare_again);
    for (size_t i = 0; i + 1 < offsets_.size(); i++)
        if (offsets_[i + 1] <= offsets_[i])
            die("%s: document %zu begins at token %lld and ends at %lld; each must hold at least one token\n  fix: %s",
                path().c_str(), i, (long long)(offsets_[i]), (long long)(offsets_[i + 1]), prepare_again);
    if (size_t(offsets_.back()) != tokens)
        die("%s: document %zu, the last, ends at token %lld but the file has %zu tokens\n  fix: %s", path().c_str(),
            documents() - 1, (long long)(offsets_.back()), tokens, prepare_again);
}

void PreparedData::read_checksums() {
    const auto text = metadata().find("checksums");
    if (text == metadata().end()) return;
    std::istringstream in(text->second);
    in >> block_tokens_ >> std::hex;
    for (uint64_t checksum; in >> checksum;) stored_.push_back(checksum);
    if (stored_.empty() || !in.eof() || block_tokens_ == 0)
        die("%s: its metadata \"checksums\" is damaged\n  fix: copy the file again, or %s", path().c_str(), prepare_again);
    if (stored_[0] != checksum_of_arrays())
        die("%s: doc_offsets, margin or label is damaged: its checksum is another than when the file was written\n  fix: copy the file again, or %s",
            path().c_str(), prepare_again);
}

PreparedData::Blocks PreparedData::blocks() const {
    Blocks out = {0};
    for (size_t i = 0; i < documents(); i++)
        if (size_t(offsets_[i + 1] - offsets_[out.back()]) >= block_tokens_ || i + 1 == documents()) out.push_back(i + 1);
    return out;
}

// Reads each block once, ids and mask together. If blocks are bad, the error of the first one is determined afterwards.
void PreparedData::check_documents(size_t vocab) {
    const Blocks first = blocks();
    const size_t count = first.size() - 1;
    if (!stored_.empty() && stored_.size() != 1 + count)
        die("%s: its metadata \"checksums\" has %zu blocks, and its documents are %zu\n  fix: copy the file again, or %s",
            path().c_str(), stored_.size() - 1, count, prepare_again);
    targets_.resize(documents()), checksums_.resize(documents());
    size_t total = 0, first_bad = documents(), first_damaged = count;
#pragma omp parallel for schedule(dynamic) reduction(+ : total) reduction(min : first_bad, first_damaged)
    for (size_t b = 0; b < count; b++) {
        try {
            const size_t begin = size_t(offsets_[first[b]]);
            const auto [all_ids, all_masks] = read_tokens(begin, size_t(offsets_[first[b + 1]]) - begin);
            if (!stored_.empty() && checksum(all_ids, all_masks) != stored_[1 + b]) first_damaged = std::min(first_damaged, b);
            for (size_t i = first[b]; i < first[b + 1]; i++) {
                const std::span ids(&all_ids[size_t(offsets_[i]) - begin], length(i));
                const std::span mask(&all_masks[size_t(offsets_[i]) - begin], length(i));
                size_t targets = 0;
                bool bad = mask[0] != 0;
                for (size_t t = 0; t < ids.size(); t++) {
                    bad |= uint32_t(ids[t]) >= vocab || mask[t] > 1;  // a negative id is a large one
                    targets += mask[t];
                }
                if (bad) first_bad = std::min(first_bad, i);
                targets_[i] = targets;
                checksums_[i] = checksum(ids, mask);
                total += targets;
            }
        } catch (const Error &) {  // no exception may leave a parallel loop
            first_bad = std::min(first_bad, first[b]);
        }
    }
    if (first_damaged < count) refuse_block(first[first_damaged], first[first_damaged + 1]);
    if (first_bad < documents()) refuse_document(first_bad, vocab);
    if (total == 0 && kind() != "prompts" && kind() != "rl")
        die("%s: none of its %zu tokens is a target, so there is nothing to learn\n"
            "  fix: %s and read its line on targets",
            path().c_str(), total_tokens(), prepare_again);
    for (size_t i = 0; (pairs() || judged()) && i < documents(); i++)
        if (targets_[i] == 0)
            die("%s: the %s of %s %zu has no token that is a target\n  fix: %s", path().c_str(),
                judged() ? "answer"
                : i % 2  ? "rejected answer"
                         : "chosen answer",
                judged() ? "document" : "pair", judged() ? i : i / 2, prepare_again);
}

// Reports documents [first, last), whose checksum differs from the written one.
void PreparedData::refuse_block(size_t first, size_t last) const {
    const auto bytes = [&](const char *name) {
        const TensorInfo &info = file_.at(name);
        const size_t each = dtype_bytes(info.dtype);
        return format("%zu to %zu (%s)", info.begin + size_t(offsets_[first]) * each,
                      info.begin + size_t(offsets_[last]) * each - 1, name);
    };
    die("%s: documents %zu to %zu are damaged, or were changed after the file was written: the checksum of its bytes %s and %s is another\n"
        "  fix: copy the file again, or %s",
        path().c_str(), first, last - 1, bytes("tokens").c_str(), bytes("loss_mask").c_str(), prepare_again);
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
