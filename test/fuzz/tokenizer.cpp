// A tokenizer.json: its hash, and the texts of its first ids.
#include "../../llmc/data/tokenizer.h"

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return fuzz("tokenizer.json", data, size, [](const std::string &path) {
        tokenizer_hash(path);
        const Tokenizer tokenizer(path);
        for (size_t id = 0; id < std::min<size_t>(tokenizer.size(), 300); id++) {
            const int32_t ids[] = {int32_t(id), int32_t(id / 2)};
            try {
                tokenizer.decode(ids);
            } catch (const Error &) {}  // an id without a token
        }
    });
}
