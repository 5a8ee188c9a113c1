// Reads PTX: the entries of a module, and the instructions of a kernel.
#include <cxxabi.h>

#include <fstream>
#include <sstream>

#include "decoder.h"

namespace ptx {
namespace {

// "void gpu::op_kernel<bf16, 8>(float*, Pieces, unsigned long)" -> "op_kernel<bf16, 8>", {"float*", "Pieces", "unsigned long"}
void demangle(Kernel &kernel) {
    int failed;
    char *readable = abi::__cxa_demangle(kernel.mangled.c_str(), nullptr, nullptr, &failed);
    kernel.name = failed ? kernel.mangled : readable;
    free(readable);
    if (failed) return;
    std::string &name = kernel.name;
    int depth = 0;
    size_t open = name.size() - 1;  // the bracket of the parameters
    do depth += (name[open] == ')') - (name[open] == '(');
    while (depth && open--);
    kernel.types = split(name.substr(open + 1, name.size() - open - 2), ',');
    name = name.substr(0, open);
    const size_t before = name.find_last_of(" :", name.find('<'));  // a return type, namespaces
    if (before != std::string::npos) name = name.substr(before + 1);
}

// ".param .align 8 .b8 NAME[16]" or ".param .u64 NAME"
Parameter parameter(const std::string &declaration, size_t &end) {
    std::istringstream in(declaration);
    std::string word;
    size_t align = 0, bytes = 0;
    while (in >> word) {
        if (word == ".align") in >> align;
        else if (word[0] == '.' && word != ".param") bytes = size_t(width_of(word.substr(1)));
    }
    if (const size_t open = word.find('['); open != std::string::npos) bytes *= std::stoul(word.substr(open + 1));
    const size_t offset = round_up(end, align ? align : bytes);
    end = offset + bytes;
    return {offset, bytes};
}
}  // namespace

std::string strip(const std::string &s) {
    const size_t first = s.find_first_not_of(" \t\n\r"), last = s.find_last_not_of(" \t\n\r");
    return first == std::string::npos ? "" : s.substr(first, last - first + 1);
}

std::vector<std::string> split(const std::string &s, char at) {
    std::vector<std::string> parts;
    std::string part;
    int depth = 0;
    for (char c : s) {
        depth += (c == '{' || c == '[' || c == '<' || c == '(') - (c == '}' || c == ']' || c == '>' || c == ')');
        if (c == at && depth == 0) parts.push_back(strip(part)), part.clear();
        else part += c;
    }
    if (!strip(part).empty()) parts.push_back(strip(part));
    return parts;
}

int width_of(const std::string &type) { return type == "pred" ? 0 : std::stoi(type.substr(1)) / 8; }

Module::Module(std::string text) : text_(std::move(text)) {
    for (size_t at = 0; (at = text_.find(".entry ", at)) != std::string::npos; at++) {
        const size_t open = text_.find('(', at);
        entries_[strip(text_.substr(at + 7, open - at - 7))] = {open, text_.find('{', open), nullptr};
    }
}

Module Module::read(const std::string &path) {
    std::ifstream in(path);
    if (!in) die("cannot read %s", path.c_str());
    std::stringstream text;
    text << in.rdbuf();
    return Module(text.str());
}

std::vector<std::string> Module::entries() const {
    std::vector<std::string> names;
    for (const auto &[name, entry] : entries_) names.push_back(name);
    return names;
}

const Kernel &Module::kernel(const std::string &mangled) {
    const std::lock_guard guard(*lock_);
    const auto found = entries_.find(mangled);
    if (found == entries_.end()) die("the module has no kernel %s", mangled.c_str());
    Entry &entry = found->second;
    if (!entry.kernel) {
        auto kernel = std::make_unique<Kernel>();
        kernel->mangled = mangled;
        demangle(*kernel);
        const size_t close = text_.find(')', entry.parameters);
        for (const std::string &p : split(text_.substr(entry.parameters + 1, close - entry.parameters - 1), ','))
            kernel->parameters.push_back(parameter(p, kernel->parameter_bytes));
        Decoder(text_, *kernel).kernel(entry.body);
        entry.kernel = std::move(kernel);
    }
    return *entry.kernel;
}
}  // namespace ptx
