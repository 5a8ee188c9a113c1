// Prepared data files, correct or wrong, in the format of llmc/data/tokens.h.
#pragma once
#include <cstdint>
#include <map>

#include "../llmc/data/tokens.h"
#include "errors.h"

struct Prepared {
    std::vector<int32_t> tokens;
    std::vector<uint8_t> mask;
    std::vector<int64_t> offsets = {0};
    std::map<std::string, std::string> metadata = {
        {"kind", "sft"}, {"vocab_size", "100"}, {"tokenizer_hash", "00000000deadbeef"}};
    std::vector<float> margins, labels;
    bool wide = false;  // I32 instead of U16

    void add(const std::vector<int32_t> &ids, const std::vector<uint8_t> &targets) {
        tokens.insert(tokens.end(), ids.begin(), ids.end());
        mask.insert(mask.end(), targets.begin(), targets.end());
        offsets.push_back(int64_t(tokens.size()));
    }

    std::string bytes() const {
        std::string header = "{", data;
        const auto append = [&](const char *name, const char *dtype, const auto &values) {
            const size_t begin = data.size(), size = values.size() * sizeof(values[0]);
            if (size) data.append(reinterpret_cast<const char *>(values.data()), size);
            header += format(R"("%s": {"dtype": "%s", "shape": [%zu], "data_offsets": [%zu, %zu]}, )", name, dtype, values.size(),
                             begin, data.size());
        };
        append("doc_offsets", "I64", offsets);
        if (wide) append("tokens", "I32", tokens);
        else append("tokens", "U16", std::vector<uint16_t>(tokens.begin(), tokens.end()));
        append("loss_mask", "U8", mask);
        if (!margins.empty()) append("margin", "F32", margins);
        if (!labels.empty()) append("label", "F32", labels);
        header += R"("__metadata__": {)";
        for (const char *comma = ""; const auto &[key, value] : metadata) {
            header += format(R"(%s"%s": "%s")", comma, key.c_str(), value.c_str());
            comma = ", ";
        }
        header += "}}";
        header.resize(round_up(header.size(), 8), ' ');
        const uint64_t length = header.size();
        return std::string(reinterpret_cast<const char *>(&length), 8) + header + data;
    }
};

struct PreparedFile : TemporaryFile {
    explicit PreparedFile(const Prepared &p) : TemporaryFile("prepared.safetensors") { write(p); }
    using TemporaryFile::write;
    void write(const Prepared &p) const { write(p.bytes()); }
    PreparedData open(size_t vocab = 100, const std::string &hash = "") const { return PreparedData(path, vocab, hash); }
};
