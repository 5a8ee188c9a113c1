// A safetensors file: its header, then every tensor as float and as bf16.
#include "../../llmc/io/safetensors.h"

#include "fuzz.h"

template <class X> static void read(const SafetensorsFile &file, const std::string &name, size_t count) {
    std::vector<X> values(count);
    try {
        file.read(name, values.data());
    } catch (const Error &) {}  // the type is no float
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return fuzz("model.safetensors", data, size, [](const std::string &path) {
        const SafetensorsFile file(path);
        for (const auto &[name, tensor] : file.tensors()) {
            read<float>(file, name, elements(tensor.shape));
            read<bf16>(file, name, elements(tensor.shape));
        }
    });
}
