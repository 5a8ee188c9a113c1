// A fuzzer (libFuzzer: https://llvm.org/docs/LibFuzzer.html) gives arbitrary bytes to a parser of users' files. For all bytes the parser returns a result or
// throws an Error: no crash, no undefined behaviour, no hang, and no allocation beyond the file's size (scripts/fuzz.py sets the limits).
#pragma once
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "../../llmc/core/common.h"
#include "../../llmc/core/file.h"

// A directory of this process, in memory if the system has /dev/shm.
inline const std::string &fuzz_directory() {
    static const struct Directory {
        std::string path = (std::filesystem::exists("/dev/shm") ? "/dev/shm/fuzz_" : "/tmp/fuzz_") + std::to_string(getpid());
        Directory() { std::filesystem::create_directories(path); }
        ~Directory() { std::filesystem::remove_all(path); }
    } directory;
    return directory.path;
}

// Writes the bytes to a file and calls parse(path).
template <class F> int fuzz(const char *name, const uint8_t *data, size_t size, F parse) {
    const std::string path = fuzz_directory() + "/" + name;
    FILE *file = fopen(path.c_str(), "w");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file) != 0) abort();
    try {
        parse(path);
    } catch (const Error &) {}
    return 0;
}
