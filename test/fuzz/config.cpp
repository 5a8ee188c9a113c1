// A model's config.json, and the values derived from it.
#include "../../llmc/model/config.h"

#include "fuzz.h"

static const std::string written = fuzz_directory() + "/written";

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    std::filesystem::create_directories(written);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return fuzz("config.json", data, size, [](const std::string &path) {
        std::vector<std::string> notes;
        ModelConfig config = read_config(std::filesystem::path(path).parent_path(), notes);
        write_config(written, config, "F32");
    });
}
