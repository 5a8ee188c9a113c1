#include "stop.h"

#include <algorithm>

StopStrings::StopStrings(const Tokenizer &tokenizer, std::span<const std::string> texts)
    : tokenizer_(&tokenizer), texts_(texts.begin(), texts.end()) {
    for (const std::string &text : texts_) longest_ = std::max(longest_, text.size());
}

// A token is at least a byte of text, unless it is special, so that the last tokens suffice. The first of them may lose a space in decoding, which is why there
// is one more, and a run of bytes must be whole.
bool StopStrings::end(std::span<const int32_t> answer) const {
    if (texts_.empty()) return false;
    size_t first = answer.size();
    for (size_t of_text = 0; first > 0 && of_text <= longest_; first--) of_text += !tokenizer_->is_special(answer[first - 1]);
    while (first > 0 && tokenizer_->is_byte(answer[first - 1])) first--;
    const std::string text = tokenizer_->decode(answer.subspan(first));
    return before(text).size() < text.size();
}

std::string StopStrings::before(const std::string &text) const {
    size_t end = text.size();
    for (const std::string &stop : texts_) end = std::min(end, text.find(stop));
    return text.substr(0, end);
}
