// Functions that every GPU has: printf and assert. CUDA Programming Guide, "Formatted Output", "Assertion".
#include <cstdio>

#include "forms.h"
#include "memory.h"

namespace ptx {
namespace {

std::string text_at(Warp &w, int lane, uint64_t address) {
    std::string text;
    for (char c; (c = char(*readable(w, lane, address++, 1)));) text += c;
    return text;
}

// Formats one argument by its specification, such as "%-8.3f". `at` is its position in the list, in which each argument is aligned to its size.
std::string formatted(Warp &w, int lane, const std::string &how, uint64_t &at) {
    const auto next = [&]<class T>(T value) {
        at = round_up(at, sizeof value);
        memcpy(&value, readable(w, lane, at, sizeof value), sizeof value);
        at += sizeof value;
        return value;
    };
    const char kind = how.back();
    const bool wide = how.find_first_of("ljzt") != std::string::npos;
    if (kind == 's') return format(how.c_str(), text_at(w, lane, next(uint64_t())).c_str());
    if (kind == 'p') return format(how.c_str(), reinterpret_cast<void *>(next(uintptr_t())));
    if (strchr("aAeEfFgG", kind)) return format(how.c_str(), next(double()));
    if (!strchr("cdiouxX", kind)) w.fail(lane, "printf does not know " + how);
    return wide ? format(how.c_str(), next(int64_t())) : format(how.c_str(), next(int32_t()));
}

// d = printf(format, arguments), lane by lane
void print(Warp &w, const Instruction &i) {
    const uint64_t *text = w.values<uint64_t>(i.operands[1]), *arguments = w.values<uint64_t>(i.operands[2]);
    alignas(64) uint32_t counts[lanes] = {};
    Warp::each_lane(w.active, [&](int l) {
        const std::string how = text_at(w, l, text[l]);
        std::string line;
        uint64_t at = arguments[l];
        for (size_t n = 0; n < how.size(); n++) {
            if (how[n] != '%') line += how[n];
            else if (how[n + 1] == '%') line += how[n++];
            else {
                const size_t end = how.find_first_of("aAcdeEfFgGiopsuxX", n);
                if (end == std::string::npos) w.fail(l, "printf does not know " + how.substr(n));
                line += formatted(w, l, how.substr(n, end - n + 1), at), counts[l]++, n = end;
            }
        }
        fputs(line.c_str(), stdout);
    });
    w.write(i.operands[0], counts);
}

// assert(): the arguments are expression, file, line, function, bytes per character
void fail_assertion(Warp &w, const Instruction &i) {
    const int l = std::countr_zero(w.active);
    const auto text = [&](int n) { return text_at(w, l, w.values<uint64_t>(i.operands[n])[l]); };
    w.fail(l, format("%s:%u: %s: the assertion \"%s\" failed", text(1).c_str(), w.values<uint32_t>(i.operands[2])[l],
                     text(3).c_str(), text(0).c_str()));
}

void trap(Warp &w, const Instruction &) { w.fail(std::countr_zero(w.active), "ends the launch by a trap"); }
}  // namespace

void add_system_calls(Forms &forms) {
    forms["call vprintf"] = {print, Pipe::control, 1, {4, 8, 8}};
    forms["call __assertfail"] = {fail_assertion, Pipe::control, 0, {8, 8, 4, 8, 8}};
    forms["trap"] = forms["brkpt"] = {trap, Pipe::control, 0, {}};
}
}  // namespace ptx
