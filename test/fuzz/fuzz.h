// What the fuzzers share (libFuzzer: https://llvm.org/docs/LibFuzzer.html). A fuzzer gives arbitrary bytes to one of the parsers that read a
// user's files. Whatever they are, the parser ends in its result or in an Error: no crash, no undefined behaviour, no hang, and no
// allocation that the bytes of the file do not explain (scripts/fuzz.py sets the limits).
#pragma once
#include <stdlib.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "../../llmc/core/common.h"
#include "../../llmc/core/file.h"

// A directory of this process, in memory where the system has such a place.
inline const std::string &fuzz_directory() {
    static const struct Directory {
        std::string path = (std::filesystem::exists("/dev/shm") ? "/dev/shm/fuzz_" : "/tmp/fuzz_") + std::to_string(getpid());
        Directory() { std::filesystem::create_directories(path); }
        ~Directory() { std::filesystem::remove_all(path); }
    } directory;
    return directory.path;
}

// parse(path) of a file with these bytes.
template <class F> int fuzz(const char *name, const uint8_t *data, size_t size, F parse) {
    const std::string path = fuzz_directory() + "/" + name;
    FILE *file = fopen(path.c_str(), "w");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file) != 0) abort();
    try {
        parse(path);
    } catch (const Error &) {}
    return 0;
}
