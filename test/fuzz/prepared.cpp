// Prepared data, and rows packed from it.
#include "../../llmc/data/dataloader.h"
#include "../../llmc/data/tokens.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return fuzz("data.safetensors", data, size, [](const std::string &path) {
        const PreparedData prepared(path, 96, "");
        std::vector<size_t> samples(prepared.size());
        for (size_t s = 0; s < samples.size(); s++) samples[s] = s;
        for (const auto &row : pack_samples(prepared, samples, size_t(1) << 16)) make_row(prepared, row);
    });
}
