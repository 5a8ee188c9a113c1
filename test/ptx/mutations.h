// Changes of single lines of PTX, by which tests make the mistakes of a compiler or of a hand.
#pragma once
#include <functional>
#include <string>
#include <vector>

using Lines = std::vector<std::string>;
using Change = std::function<void(Lines &lines, size_t n)>;  // of the line n

inline bool contains(const std::string &line, const std::string &what) { return line.find(what) != std::string::npos; }

inline Lines lines_of(const std::string &text) {
    Lines lines;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find('\n', at), text.size());
        lines.push_back(text.substr(at, end - at));
        at = end + 1;
    }
    return lines;
}
inline std::string text_of(const Lines &lines) {
    std::string text;
    for (const std::string &line : lines) text += line + "\n";
    return text;
}

inline void replace(std::string &line, const std::string &from, const std::string &to) {
    if (const size_t at = line.find(from); at != std::string::npos) line.replace(at, from.size(), to);
}

// Changes every line that holds `what`, or the middle one. Returns how many lines have changed.
inline size_t change_lines(std::string &text, const std::string &what, bool all, const Change &change) {
    Lines lines = lines_of(text);
    std::vector<size_t> found;
    for (size_t n = lines.size(); n-- > 0;)  // from the end, so that a line which moves down is not met again
        if (contains(lines[n], what)) found.push_back(n);
    if (!all && !found.empty()) found = {found[found.size() / 2]};
    size_t changed = 0;
    for (const size_t n : found) {
        const Lines before = lines;
        change(lines, n);
        changed += lines != before;
    }
    text = text_of(lines);
    return changed;
}

// ---- changes of a line

inline Change replaced(const std::string &from, const std::string &to) {
    return [=](Lines &l, size_t n) { replace(l[n], from, to); };
}
inline void erase(Lines &l, size_t n) { l[n].clear(); }
inline void put(std::string &line, size_t begin, size_t end, const std::string &text) {
    line = line.substr(0, begin) + text + line.substr(end);
}
inline Change last_operand(const std::string &value) {
    return [=](Lines &l, size_t n) { put(l[n], l[n].rfind(',') + 1, l[n].size(), " " + value + ";"); };
}
