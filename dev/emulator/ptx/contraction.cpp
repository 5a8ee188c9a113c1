// Contracts a product and a sum to an fma, as ptxas does by default (--fmad=true). PTX ISA, "mul", "add", "sub": without a rounding modifier they may be
// fused. nvcc's PTX has an fma for a b + c, and leaves a b - c and c - a b to ptxas.
#include <map>

#include "names.h"

namespace ptx {
namespace {

struct Name {
    std::string operation, type;  // "sub", ".ftz.f32"
};
Name name_of(const std::string &text) {  // "@%p1 sub.ftz.f32 %f1, %f2, %f3"
    const size_t begin = text[0] == '@' ? text.find_first_not_of(" \t\n", text.find_first_of(" \t\n")) : 0,
                 end = std::min(text.find_first_of(" \t\n", begin), text.size()), dot = std::min(text.find('.', begin), end);
    return {text.substr(begin, dot - begin), text.substr(dot, end - dot)};
}
bool fuses(const Name &name) { return name.type == ".f32" || name.type == ".ftz.f32" || name.type == ".f64"; }
bool is_sum(const Name &name) { return (name.operation == "add" || name.operation == "sub") && fuses(name); }

// In machine code these are calls, or loops. The functions of 32-bit floats become branches only after the contraction.
bool ends_block(const Instruction &i, const Name &name) {
    const std::string &o = name.operation;
    const bool of_64_bits = name.type.size() > 2 && name.type.ends_with("64");
    return i.control == Control::branch || i.control == Control::leave || o == "call" ||
           (of_64_bits && (o == "div" || o == "rem" || o == "rcp" || o == "sqrt"));
}

// A product of two registers or constants. It is free if only sums of its type and its basic block use it, each of them once.
struct Product {
    size_t at;                  // its instruction
    size_t uses = 0, left = 0;  // sums that use it; the ones that are not contracted
    bool free = true;
};

class Contraction {
  public:
    explicit Contraction(Kernel &kernel) : kernel_(kernel), code_(kernel.code), names_(code_.size()), blocks_(code_.size()) {
        number_blocks();
        find_products();
    }

    // A sum of two free products takes the one with fewer uses, or the left one, and the other one remains a product.
    void contract() {
        for (const bool of_two : {true, false})
            for (size_t n = 0; n < code_.size(); n++) {
                if (!is_sum(names_[n]) || code_[n].reads == 3) continue;
                const Product *left = free(n, 1), *right = free(n, 2);
                if (of_two ? left && right : left || right) fuse(n, !left || (right && right->uses < left->uses) ? 2 : 1);
            }
        remove_products();
    }

  private:
    void number_blocks() {
        std::vector<bool> begins(code_.size() + 1);
        for (size_t n = 0; n < code_.size(); n++) {
            names_[n] = name_of(kernel_.text[n]);
            if (code_[n].control == Control::branch) begins[size_t(code_[n].target)] = true;
            if (ends_block(code_[n], names_[n])) begins[n + 1] = true;
        }
        for (size_t n = 1; n < code_.size(); n++) blocks_[n] = blocks_[n - 1] + begins[n];
    }

    void find_products() {
        std::map<int, size_t> writers;  // of each slot: how many instructions
        for (const Instruction &i : code_) {
            for (int w = 0; w < i.writes; w++) writers[i.operands[w]]++;
            for (const int slot : i.accumulators) writers[slot]++;
        }
        for (size_t n = 0; n < code_.size(); n++)
            if (names_[n].operation == "mul" && fuses(names_[n]) && code_[n].guard < 0 && writers[code_[n].operands[0]] == 1)
                products_[code_[n].operands[0]] = {n};
        for (size_t n = 0; n < code_.size(); n++) {
            const Instruction &i = code_[n];
            for (int r = i.writes; r < i.writes + i.reads; r++)
                if (const auto found = products_.find(i.operands[r]); found != products_.end()) note_use(found->second, n);
            for (const int slot : i.accumulators)
                if (const auto found = products_.find(slot); found != products_.end()) found->second.free = false;
        }
    }
    void note_use(Product &p, size_t n) {
        const Instruction &product = code_[p.at], &sum = code_[n];
        p.uses++, p.left++;
        p.free = p.free && is_sum(names_[n]) && names_[n].type == names_[p.at].type && blocks_[n] == blocks_[p.at] && n > p.at &&
                 sum.operands[1] != sum.operands[2];
        for (size_t between = p.at + 1; p.free && between < n; between++)  // the sum needs the factors
            for (int w = 0; w < code_[between].writes; w++)
                if (code_[between].operands[w] == product.operands[1] || code_[between].operands[w] == product.operands[2])
                    p.free = false;
    }

    Product *free(size_t sum, int operand) {
        const auto found = products_.find(code_[sum].operands[operand]);
        return found != products_.end() && found->second.free ? &found->second : nullptr;
    }

    void fuse(size_t n, int side) {
        Instruction &sum = code_[n];
        Product &p = products_.at(sum.operands[side]);
        const int addend = sum.operands[3 - side];
        if (Product *other = free(n, 3 - side)) other->free = false;
        const bool flushed = names_[n].type == ".ftz.f32";
        const char *sign = names_[n].operation == "add" ? "" : side == 1 ? ", a b - c" : ", c - a b";
        const Form &form = all_forms().at("fma.rn" + std::string(flushed ? ".f32" : names_[n].type) + sign);
        sum.run = flushed ? form.flushed : form.run;
        sum.operands[1] = code_[p.at].operands[1], sum.operands[2] = code_[p.at].operands[2], sum.operands[3] = addend;
        sum.reads = 3;
        p.left--;
    }

    void remove_products() {
        std::vector<bool> removed(code_.size());
        for (const auto &[slot, p] : products_) removed[p.at] = p.uses && !p.left;
        std::vector<int> moved(code_.size() + 1);
        size_t kept = 0;
        for (size_t n = 0; n < code_.size(); n++) {
            moved[n] = int(kept);
            if (removed[n]) continue;
            if (kept != n) code_[kept] = std::move(code_[n]), kernel_.text[kept] = std::move(kernel_.text[n]);
            kept++;
        }
        moved.back() = int(kept);
        code_.resize(kept), kernel_.text.resize(kept);
        for (Instruction &i : code_)
            if (i.control == Control::branch) i.target = moved[size_t(i.target)];
    }

    Kernel &kernel_;
    std::vector<Instruction> &code_;
    std::vector<Name> names_;
    std::vector<int> blocks_;
    std::map<int, Product> products_;  // by their slot
};
}  // namespace

void contract(Kernel &kernel) { Contraction(kernel).contract(); }
}  // namespace ptx
