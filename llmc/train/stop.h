// Stop strings: texts that end an answer as soon as its decoded text contains one, wherever in its tokens they begin and end.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "../data/tokenizer.h"

class StopStrings {
  public:
    StopStrings() = default;
    StopStrings(const Tokenizer &tokenizer, std::span<const std::string> texts);  // the tokenizer must live as long

    bool end(std::span<const int32_t> answer) const;    // whether its text contains one, if it did not without the last token
    std::string before(const std::string &text) const;  // the text up to the first of them

  private:
    const Tokenizer *tokenizer_ = nullptr;
    std::vector<std::string> texts_;
    size_t longest_ = 0;  // bytes
};
