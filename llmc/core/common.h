// Helpers for all other files: the error type, printf into a string, integer arithmetic.
#pragma once
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

// Returns a message for a terminal: at most 4 KB, without the middle of long lines and of many lines, so that its begin and its last line, the fix,
// remain. Control characters and bytes that are not UTF-8, which can come from a file, are written as \x1b.
std::string presentable(const std::string &text);

// An error that a user can cause or fix. It is thrown, and not printed where it occurs: main() prints it once and exits with code 1, and ranks that
// are threads survive it. The text gives the cause, and often has a second line "  fix: ...".
struct Error : std::runtime_error {
    explicit Error(const std::string &text) : std::runtime_error(presentable(text)) {}
};

// Returns the message of any exception. One that is not an Error is from the standard library, and gets a cause and a fix.
std::string message_of(const std::exception &error);

inline std::string vformat(const char *text, va_list args) {
    va_list again;
    va_copy(again, args);
    const int length = vsnprintf(nullptr, 0, text, args);
    std::string out(size_t(length < 0 ? 0 : length), '\0');
    vsnprintf(out.data(), out.size() + 1, text, again);
    va_end(again);
    return out;
}

__attribute__((format(printf, 1, 2))) inline std::string format(const char *text, ...) {
    va_list args;
    va_start(args, text);
    std::string out = vformat(text, args);
    va_end(args);
    return out;
}

// Throws an Error: die("row %zu has %zu tokens but a row holds %zu\n  fix: --row_tokens %zu", ...). The cause comes first, then the fix.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void die(const char *text, ...) {
    va_list args;
    va_start(args, text);
    std::string message = vformat(text, args);
    va_end(args);
    throw Error(message);
}

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }
constexpr size_t round_up(size_t a, size_t multiple) { return ceil_div(a, multiple) * multiple; }
