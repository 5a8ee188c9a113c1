// Reads PTX: the entries of a module, and the instructions of a kernel.
#include <cxxabi.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>
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

// "{{1, 2}, {0f3F800000, 4}}" -> "1", "2", "0f3F800000", "4"
std::vector<std::string> scalars(std::string values) {
    std::erase_if(values, [](char c) { return c == '{' || c == '}'; });
    return split(values, ',');
}

// Allocates device memory for a variable and stores its values; zeros follow the last value.
void set(Variable &v, const std::vector<std::string> &values, size_t width) {
    const size_t bytes = round_up(std::max(v.bytes, values.size() * width), 256);
    v.memory.reset(static_cast<uint8_t *>(aligned_alloc(256, bytes)));
    memset(v.memory.get(), 0, bytes);
    for (size_t n = 0; n < values.size(); n++) {
        const std::string &value = values[n];
        const bool hex = value[0] == '0' && (value[1] == 'f' || value[1] == 'd');
        if (!isdigit(value[0]) && value[0] != '-') v.unknown = value;  // an address
        else {
            const uint64_t bits = hex               ? std::stoull(value.substr(2), nullptr, 16)
                                  : value[0] == '-' ? uint64_t(std::stoll(value, nullptr, 0))
                                                    : std::stoull(value, nullptr, 0);
            memcpy(v.memory.get() + n * width, &bits, std::min<size_t>(width, 8));
        }
    }
}

// ".maxntid 128, 2, 1\n.minnctapersm 2", ".maxntid" -> {128, 2, 1}
std::vector<unsigned> numbers(const std::string &directives, const std::string &name) {
    const size_t at = directives.find(name);
    std::vector<unsigned> found;
    if (at == std::string::npos) return found;
    const size_t begin = at + name.size(), end = directives.find('.', begin);
    for (const std::string &n : split(directives.substr(begin, end - begin), ',')) found.push_back(unsigned(std::stoul(n)));
    return found;
}

// Returns the registers of a thread if directives limit them, else 0. ptxas ignores .minnctapersm without a number of threads.
uint32_t registers_at_start(const std::string &directives) {
    uint32_t limit = registers_of_multiprocessor;
    for (const unsigned n : numbers(directives, ".maxnreg")) limit = n;
    const std::vector<unsigned> blocks = numbers(directives, ".minnctapersm");
    for (const char *name : {".maxntid", ".reqntid"})
        if (const std::vector<unsigned> threads = numbers(directives, name); !blocks.empty() && !threads.empty())
            limit = std::min(limit, registers_of_multiprocessor /
                                        std::accumulate(threads.begin(), threads.end(), blocks[0], std::multiplies<>()) / 8 * 8);
    return limit == registers_of_multiprocessor ? 0 : std::min(limit, 256u);
}

// ".param .align 8 .b8 NAME[16]", ".param .u64 NAME" or ".param .u64 .ptr .global .align 16 NAME"; the part from .ptr on describes the target of the
// pointer.
Parameter parameter(const std::string &declaration, size_t &end) {
    std::istringstream in(declaration);
    std::string word;
    size_t align = 0, bytes = 0;
    for (bool points = false; in >> word;) {
        points = points || word == ".ptr";
        if (points) continue;
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

int width_of(const std::string &type) {  // "pred", "u64", "bf16x2"
    if (type == "pred") return 0;
    const size_t digits = type.find_first_of("0123456789"), times = type.find('x');
    if (digits == std::string::npos) die("the PTX has the unknown type %s", type.c_str());
    return std::stoi(type.substr(digits)) / 8 * (times == std::string::npos ? 1 : std::stoi(type.substr(times + 1)));
}

// The most dynamic shared memory that a launch may request: the CUDA Programming Guide, "Compute Capabilities".
uint32_t max_shared_of(int architecture) {
    switch (architecture) {
        case 70: return 96 * 1024;
        case 75: return 64 * 1024;
        case 80:
        case 87: return 163 * 1024;
        case 86:
        case 89:
        case 120: return 99 * 1024;
        default: return max_shared;
    }
}

// ".shared .align 4 .b8 tile[4][8], other", ".global .align 4 .u32 table[2] = {1, 2}"
std::vector<Variable> variables(const std::string &declaration) {
    std::istringstream in(declaration);
    std::string space, word;
    size_t align = 0, width = 1;
    in >> space;
    while (in >> word && word[0] == '.') {
        if (word == ".align") in >> align;
        else if (word[1] == 'v' && isdigit(word[2])) width = std::stoul(word.substr(2));  // ".v4 .f32"
        else width *= size_t(width_of(word.substr(1)));
    }
    std::string rest;
    std::getline(in, rest, '\0');
    std::vector<Variable> all;
    for (const std::string &declarator : split(word + rest, ',')) {
        const size_t equals = declarator.find('='), open = std::min(declarator.find('['), equals);
        const std::vector<std::string> values =
            equals == std::string::npos ? std::vector<std::string>() : scalars(declarator.substr(equals + 1));
        Variable v;
        v.space = space.substr(1), v.name = strip(declarator.substr(0, open)), v.align = align ? align : width, v.bytes = width;
        for (size_t at = open; (at = declarator.find('[', at)) < equals; at++)
            v.bytes *= declarator[at + 1] == ']' ? values.size() : std::stoul(declarator.substr(at + 1));
        if (v.space == "global" || v.space == "const") set(v, values, width);
        all.push_back(std::move(v));
    }
    return all;
}

Module::Module(std::string text) : text_(std::move(text)) {
    if (const size_t at = text_.find(".target sm_"); at != std::string::npos) architecture_ = std::stoi(text_.substr(at + 11));
    declarations();
    for (size_t at = 0; (at = text_.find(".entry ", at)) != std::string::npos; at++) {
        const size_t open = text_.find('(', at);
        entries_[strip(text_.substr(at + 7, open - at - 7))] = {open, text_.find('{', open), nullptr};
    }
}

// Reads the variables outside functions. A statement ends with ';', a function with '}'.
void Module::declarations() {
    std::string now;
    int depth = 0;
    bool value = false;
    for (size_t at = 0; at < text_.size(); at++) {
        const char c = text_[at];
        if (c == '/' && text_[at + 1] == '/') at = std::min(text_.find('\n', at), text_.size());
        depth += (c == '{' || c == '(') - (c == '}' || c == ')');
        if (depth == 0 && (c == ';' || (c == '}' && !value))) {
            std::istringstream words(now);
            for (std::string word; c == ';' && words >> word;)
                if (word == ".shared" || word == ".global" || word == ".const") {
                    std::string rest;
                    std::getline(words, rest, '\0');
                    for (Variable &v : variables(word + rest)) variables_[v.name] = std::move(v);
                }
            now.clear(), value = false;
        } else if (depth == 0 || value) now += c, value |= c == '=';
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
        kernel->architecture = architecture_;
        const std::string directives = text_.substr(close, entry.body - close);
        const std::vector<unsigned> blocks = numbers(directives, ".reqnctapercluster");
        std::copy(blocks.begin(), blocks.end(), kernel->cluster);
        kernel->registers = registers_at_start(directives);
        for (const auto &[name, v] : variables_)
            if (v.memory) kernel->variables.push_back(&v);
        Decoder(text_, variables_, *kernel).kernel(entry.body);
        entry.kernel = std::move(kernel);
    }
    return *entry.kernel;
}
}  // namespace ptx
