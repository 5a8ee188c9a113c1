// trainer_state.json of a checkpoint. The checksum matches, because the parser stops at a wrong one.
#include "../../llmc/train/trainer_state.h"
#include "../../llmc/core/json.h"
#include "../../llmc/train/checkpoint.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const TrainerState now{.step = 0,
                           .cursor = 0,
                           .steps = 8,
                           .skips_in_a_row = 0,
                           .totals = {},
                           .spikes = {},
                           .task = "sft",
                           .data = "chats.jsonl",
                           .data_fingerprint = "f",
                           .options = {{"seed", 42}, {"learning_rate", 1e-4}, {"max_steps", 8}, {"loss_type", "sigmoid"}}};
    return fuzz("trainer_state.json", data, size, [&](const std::string &path) {
        const nlohmann::json state = read_json(path);
        if (state.is_object()) write_checked_json(path, state);
        read_trainer_state(fuzz_directory(), now, [](const std::string &) {});
    });
}
