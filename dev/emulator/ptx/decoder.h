// From the statements of a kernel's body to its instructions.
#pragma once
#include <utility>

#include "kernel.h"

namespace ptx {

std::string strip(const std::string &s);                        // of white space
std::vector<std::string> split(const std::string &s, char at);  // but not inside brackets
int width_of(const std::string &type);                          // in bytes: "u64", "pred" (0)

class Decoder {
  public:
    Decoder(const std::string &text, Kernel &kernel);
    void kernel(size_t begin);  // whose body starts with the bracket at `begin` of the text

  private:
    using Texts = std::vector<std::string>;

    void body(size_t begin);
    void statement(const std::string &s);
    void declare(const std::string &s);
    void instruction(const std::string &s);
    void control(Instruction &i, const std::string &name, const Texts &arguments);
    void compute(Instruction &i, const std::string &name, const Texts &arguments);
    void call(const Texts &arguments);
    void close_scope();

    Texts operand_texts(const std::string &name, const Texts &arguments, Instruction &i) const;
    std::string form_name(const std::string &name, const Texts &arguments) const;
    int slot(const std::string &operand, int width);  // of a register, a constant, an address without its offset
    int register_slot(const std::string &name, int width);
    int constant(uint64_t bits, int width);
    int new_slot(int width);
    int register_width(std::string name) const;
    std::string in_scope(const std::string &name) const;
    [[noreturn]] void fail(const std::string &what) const;

    const std::string &text_;
    Kernel &kernel_;
    int line_ = 1, sink_ = -1;
    std::map<std::string, std::string> types_;  // of registers: by "%rd" if .reg declares them by number, or by the whole name
    std::map<std::string, int> registers_, specials_;
    std::map<std::pair<uint64_t, int>, int> constants_;
    // A pair of brackets { }. Its registers and labels are known inside alone, and hide those of the same name outside.
    struct Scope {
        std::map<std::string, std::string> registers;          // their unique names
        std::map<std::string, int> labels;                     // the instructions that they stand in front of
        std::vector<std::pair<size_t, std::string>> branches;  // instructions, and labels that may follow
    };
    std::vector<Scope> scopes_;
    int scopes_seen_ = 0;
    // A function is decoded where it is called. Its registers and labels get a suffix there, so that they have nobody else's names, and its
    // parameters and result are the caller's slots.
    std::string suffix_;
    int calls_ = 0;
    std::map<std::string, int> passed_;
};
}  // namespace ptx
