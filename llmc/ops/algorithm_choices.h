// Which algorithm was the fastest for each product (--autotune), remembered in the user's cache: later runs, and other ranks on such a GPU, take
// the same and have the same bits. The file has one line for each product, to which ranks append.
#pragma once
#include <array>
#include <map>
#include <string>

class AlgorithmChoices {
  public:
    using Algorithm = std::array<uint64_t, 8>;  // cuBLASLt's own form, which only the version that made it understands

    // `chooser` names all that a choice depends on but the product: GPU, version of cuBLASLt, type of the sums. Each chooser has a file of its own.
    // Dies if the file is damaged.
    explicit AlgorithmChoices(const std::string &chooser);

    const Algorithm *find(const std::string &product) const;  // nullptr: none yet
    // Remembers a choice and returns it; or, if another rank has chosen for this product since the file was read, that one's.
    const Algorithm &keep(const std::string &product, const Algorithm &algorithm);
    const std::string &path() const { return path_; }

  private:
    void read();

    std::string path_;
    std::map<std::string, Algorithm> choices_;
};
