// optimizer.json of a checkpoint with an intact other file. The checksum matches, because the parser stops at a wrong one.
#include "../../llmc/train/checkpoint.h"
#include "../../llmc/core/json.h"
#include "../../llmc/parallel/comm.h"
#include "fuzz.h"

static SelfComm comm;
static HostMemory memory;
static float values[3][5];
static OptimizerPart part(size_t first, size_t count) {
    const auto of = [&](size_t tensor) { return Floats<float>{values[tensor] + first}; };
    return {first, count, of(0), of(1), of(2)};
}
static const OptimizerState state{{part(0, 2), part(2, 3)}, 5, 1, &memory};

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    save_optimizer(comm, fuzz_directory(), state);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return fuzz("optimizer.json", data, size, [](const std::string &path) {
        const nlohmann::json manifest = read_json(path);
        if (manifest.is_object()) write_checked_json(path, manifest);
        load_optimizer(comm, fuzz_directory(), state);
    });
}
