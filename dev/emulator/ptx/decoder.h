// Decodes the statements of a kernel's body into instructions.
#pragma once
#include <utility>

#include "kernel.h"

namespace ptx {

std::string strip(const std::string &s);                        // removes white space at both ends
std::vector<std::string> split(const std::string &s, char at);  // ignores `at` inside brackets
int width_of(const std::string &type);                          // in bytes: "u64", "pred" (0)

// Parses the variables of a declaration such as ".shared .align 4 .b8 tile[4096]", with their initial values if it has any.
std::vector<Variable> variables(const std::string &declaration);

class Decoder {
  public:
    Decoder(const std::string &text, const std::map<std::string, Variable> &variables, Kernel &kernel);
    void kernel(size_t begin);  // the body starts at the bracket text[begin]

  private:
    using Texts = std::vector<std::string>;

    void body(size_t begin);
    void statement(const std::string &s);
    void declare(const std::string &s);
    void instruction(const std::string &s);
    void control(Instruction &i, const std::string &name, const Texts &arguments);
    void compute(Instruction &i, const std::string &name, const Texts &arguments);
    void product(Instruction &i, const std::string &name, Texts arguments);
    void call(Instruction &i, const Texts &arguments);
    size_t function(const std::string &name) const;
    void close_scope();

    Texts operand_texts(const std::string &name, const Texts &arguments, Instruction &i) const;
    std::string form_name(const std::string &name, const Texts &arguments) const;
    int slot(const std::string &operand, int width);  // for a register, a constant or an address without its offset
    int register_slot(const std::string &name, int width);
    int constant(uint64_t bits, int width);
    int new_slot(int width);
    const std::string *register_type(std::string name) const;
    int register_width(const std::string &name) const;
    const Variable *variable(const std::string &name) const;
    int place(const Variable &variable, uint64_t offset, int width);
    std::string in_scope(const std::string &name) const;
    [[noreturn]] void fail(const std::string &what) const;

    const std::string &text_;
    Kernel &kernel_;
    int line_ = 1, sink_ = -1;
    std::map<std::string, std::string> types_;  // of registers, by "%rd" if .reg declares them by number, else by their full name
    std::map<std::string, int> registers_, specials_;
    const std::map<std::string, Variable> &variables_;        // of the module
    std::map<std::pair<int, std::string>, uint64_t> placed_;  // variables by line and name
    size_t dynamic_align_ = 0;                                // of dynamic shared memory, if the kernel uses it
    std::vector<size_t> dynamic_presets_;                     // addresses in it
    std::map<std::pair<uint64_t, int>, int> constants_;
    // A scope { }. Its registers and labels are only visible inside, and hide outer ones of the same name.
    struct Scope {
        std::map<std::string, std::string> registers;  // their unique names
        std::map<std::string, Variable> variables;
        std::map<std::string, int> labels;                     // the instruction after each label
        std::vector<std::pair<size_t, std::string>> branches;  // branch instructions and their labels, which may be defined later
    };
    std::vector<Scope> scopes_;
    int scopes_seen_ = 0;
    // A function is decoded inline at each call. A suffix makes the names of its registers and labels unique; its parameters and result use the
    // caller's slots.
    std::string suffix_;
    int calls_ = 0;
    std::map<std::string, int> passed_;
};
}  // namespace ptx
