#include "common.h"

#include <filesystem>
#include <new>
#include <vector>

static constexpr size_t max_message = 4096, max_line = 1024, max_head = 2560;  // bytes

// Returns the length of the UTF-8 character at `at`, or 0 if there is none. Control characters other than tab and line feed count as none.
static size_t character_at(const std::string &text, size_t at) {
    const auto byte = [&](size_t i) { return i < text.size() ? uint8_t(text[i]) : uint8_t(0); };
    const uint8_t first = byte(at);
    if (first < 0x80) return (first >= 0x20 && first != 0x7f) || first == '\t' || first == '\n';
    const size_t length = first >= 0xf0 && first < 0xf5 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || (first == 0xc2 && byte(at + 1) < 0xa0)) return 0;  // 0x80 to 0x9f are control characters
    for (size_t i = 1; i < length; i++)
        if ((byte(at + i) & 0xc0) != 0x80) return 0;
    return length;
}

static bool is_inside_character(const std::string &text, size_t at) { return at < text.size() && (text[at] & 0xc0) == 0x80; }

// Removes the middle of a line.
static std::string short_line(const std::string &line) {
    if (line.size() <= max_line) return line;
    size_t head = max_line / 2, tail = line.size() - max_line / 2 + 40;  // 40 for the note
    while (is_inside_character(line, head)) head--;
    while (is_inside_character(line, tail)) tail++;
    return line.substr(0, head) + format(" ... (%zu bytes) ... ", tail - head) + line.substr(tail);
}

std::string presentable(const std::string &text) {
    std::vector<std::string> lines(1);
    for (size_t at = 0, length; at < text.size(); at += length ? length : 1) {
        length = character_at(text, at);
        if (text[at] == '\n') lines.emplace_back();
        else lines.back() += length ? text.substr(at, length) : format("\\x%02x", uint8_t(text[at]));
    }
    size_t all = 0, head = 0, tail = lines.size();
    for (std::string &line : lines) line = short_line(line), all += line.size() + 1;
    std::string begin, end;
    if (all > max_message + 1) {
        while (begin.size() + lines[head].size() + 1 <= max_head) begin += lines[head++] + "\n";
        while (begin.size() + lines[tail - 1].size() + 1 + end.size() + 40 <= max_message) end = "\n" + lines[--tail] + end;
        return begin + format("... (%zu lines)", tail - head) + end;
    }
    for (const std::string &line : lines) begin += line + "\n";
    begin.pop_back();
    return begin;
}

std::string message_of(const std::exception &error) {
    if (dynamic_cast<const Error *>(&error)) return error.what();
    if (const auto *file = dynamic_cast<const std::filesystem::filesystem_error *>(&error))
        return presentable(format("%s: %s\n  fix: give a path that exists, and that you may read and write",
                                  file->path1().c_str(), file->code().message().c_str()));
    if (dynamic_cast<const std::bad_alloc *>(&error) || dynamic_cast<const std::length_error *>(&error))
        return "needs more memory than this machine gives\n  fix: see --plan; smaller values and files need less";
    return presentable(format("%s\n  fix: this is an error of the program itself; report it with the command", error.what()));
}
