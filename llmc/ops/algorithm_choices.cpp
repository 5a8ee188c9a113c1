#include "algorithm_choices.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <fstream>
#include <sstream>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/hash.h"

AlgorithmChoices::AlgorithmChoices(const std::string &chooser) : path_(cache_file("autotune_" + hash_of(chooser))) { read(); }

// A line has the product's description, a colon and the algorithm in hex.
void AlgorithmChoices::read() {
    std::ifstream file(path_);
    std::string line;
    for (size_t number = 1; std::getline(file, line); number++) {
        const size_t colon = line.find(": ");
        std::istringstream words(colon == std::string::npos ? "" : line.substr(colon + 2));
        Algorithm algorithm;
        for (uint64_t &word : algorithm) words >> std::hex >> word;
        if (!words || words.rdbuf()->in_avail() > 0)
            die("%s: line %zu is not a product with its algorithm\n  fix: remove the file; the next run writes a new one",
                path_.c_str(), number);
        choices_.emplace(line.substr(0, colon), algorithm);
    }
}

const AlgorithmChoices::Algorithm *AlgorithmChoices::find(const std::string &product) const {
    const auto found = choices_.find(product);
    return found == choices_.end() ? nullptr : &found->second;
}

const AlgorithmChoices::Algorithm &AlgorithmChoices::keep(const std::string &product, const Algorithm &algorithm) {
    const int fd = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0 || flock(fd, LOCK_EX) != 0) die("%s: cannot open: %s%s", path_.c_str(), strerror(errno), other_place);
    read();  // other ranks may have appended to it since
    const auto [kept, is_new] = choices_.emplace(product, algorithm);
    std::string line = product + ":";
    for (uint64_t word : algorithm) line += format(" %" PRIx64, word);
    line += "\n";
    const bool written = !is_new || write(fd, line.data(), line.size()) == ssize_t(line.size());
    close(fd);  // also releases the lock
    if (!written) die("%s: cannot write: %s%s", path_.c_str(), strerror(errno), other_place);
    return kept->second;
}
