// model.safetensors.index.json of a model with one shard in the same directory.
#include "../../llmc/io/hf.h"
#include "../../llmc/io/safetensors.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    const float values[4] = {1, 2, 3, 4};
    HostMemory host;
    SafetensorsWriter writer(fuzz_directory() + "/a.safetensors", {{"w", {2, 2}, "F32"}});
    writer.write("w", values, host);
    writer.finish();
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return fuzz("model.safetensors.index.json", data, size, [](const std::string &) {
        const HfWeights weights(fuzz_directory());
        weights.find("w");
        weights.expect_only({"w"});
    });
}
