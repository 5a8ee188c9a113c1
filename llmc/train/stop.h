// Stop strings: texts that end an answer as soon as its decoded text contains one, independently of token boundaries.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "../data/tokenizer.h"

class StopStrings {
  public:
    StopStrings() = default;
    StopStrings(const Tokenizer &tokenizer, std::span<const std::string> texts);  // the tokenizer must outlive this object

    bool end(std::span<const int32_t> answer) const;    // true if the last token completes a stop string in the answer's text
    std::string before(const std::string &text) const;  // returns the text up to the first stop string

  private:
    const Tokenizer *tokenizer_ = nullptr;
    std::vector<std::string> texts_;
    size_t longest_ = 0;  // bytes
};
