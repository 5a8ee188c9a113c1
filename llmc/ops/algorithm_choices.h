// The fastest algorithm of each product, stored in a file in the user's cache. Later runs, and other ranks on the same GPU model, use
// the same algorithms and get the same bits. Ranks append to the file, which has one line per product.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>

class AlgorithmChoices {
  public:
    using Algorithm = std::array<uint64_t, 8>;  // an opaque value, valid for one version of cuBLASLt

    // `chooser` names everything besides the product that a choice depends on: GPU, version of cuBLASLt, type of the sums. There is a file per
    // chooser. Dies if the file is damaged.
    explicit AlgorithmChoices(const std::string &chooser);

    const Algorithm *find(const std::string &product) const;  // nullptr: none yet
    // Stores a choice and returns it. If another rank has stored one for this product since the file was read, returns that choice instead.
    const Algorithm &keep(const std::string &product, const Algorithm &algorithm);
    const std::string &path() const { return path_; }

  private:
    void read();

    std::string path_;
    std::map<std::string, Algorithm> choices_;
};
