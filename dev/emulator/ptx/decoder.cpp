#include "decoder.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <tuple>

#include "names.h"

namespace ptx {
namespace {

// " .b32 a, b" -> "b32", {"a", "b"}
std::pair<std::string, std::vector<std::string>> type_and_names(const std::string &declaration) {
    std::istringstream in(declaration);
    std::string type, names;
    in >> type;
    std::getline(in, names, '\0');
    return {type.substr(1), split(names, ',')};
}

// "[%rd1+-16]" -> "%rd1", -16
std::pair<std::string, int64_t> address(const std::string &operand) {
    const std::string inside = strip(operand.substr(1, operand.size() - 2));
    const size_t plus = inside.find('+');
    if (plus == std::string::npos) return {inside, 0};
    return {strip(inside.substr(0, plus)), std::stoll(inside.substr(plus + 1))};
}
}  // namespace

Decoder::Decoder(const std::string &text, const std::map<std::string, Variable> &variables, Kernel &kernel)
    : text_(text), kernel_(kernel), variables_(variables) {}

void Decoder::fail(const std::string &what) const {
    die("line %d of the PTX, in %s: %s", line_, kernel_.name.c_str(), what.c_str());
}

void Decoder::kernel(size_t begin) {
    body(begin);
    if (kernel_.static_shared > max_static_shared)
        fail(format("%zu bytes of static shared memory\n  fix: at most %u, and more as dynamic shared memory",
                    kernel_.static_shared, max_static_shared));
    if (dynamic_align_) kernel_.static_shared = round_up(kernel_.static_shared, dynamic_align_);
    for (const size_t n : dynamic_presets_) kernel_.presets[n].bits += shared_base + kernel_.static_shared;
    contract(kernel_);
    const std::vector<int> join = joins(kernel_.code);
    for (size_t n = 0; n < join.size(); n++) kernel_.code[n].join = join[n];
    join_loads(kernel_.code);
    kernel_.looped = number_looped_loads(kernel_.code);
    std::set<int> constants;
    for (const Preset &p : kernel_.presets)
        if (p.special.empty()) constants.insert(p.slot);
    find_machine_blocks(kernel_.code, constants);
}

// Statements end with ';', labels with ':'; a bracket where a statement could start opens or closes a scope.
void Decoder::body(size_t begin) {
    const size_t scopes_around = scopes_.size();
    line_ = 1 + int(std::count(text_.begin(), text_.begin() + long(begin), '\n'));
    std::string now;
    for (size_t at = begin; at < text_.size(); at++) {
        const char c = text_[at];
        const bool fresh = now.find_first_not_of(" \t\n\r") == std::string::npos;
        if (c == '/' && text_[at + 1] == '/') {
            at = text_.find('\n', at) - 1;
        } else if (fresh && c == '{') {
            scopes_.emplace_back();
        } else if (fresh && c == '}') {
            close_scope();
            if (scopes_.size() == scopes_around) break;
        } else if (c == ':' && text_[at + 1] == ':') {  // "shared::cta"
            now += "::", at++;
        } else if (c == ':' || c == ';') {
            if (c == ':') {
                if (!scopes_.back().labels.emplace(strip(now), int(kernel_.code.size())).second)
                    fail("two labels " + strip(now) + " in one scope");
            } else if (!fresh) statement(strip(now));
            now.clear();
        } else {
            now += c;
            if (c == '\n') line_++;
            if (c == '\n' && strip(now).rfind(".loc", 0) == 0) now.clear();  // the one statement without ';'
        }
    }
}

// Returns the position of a function's body.
size_t Decoder::function(const std::string &name) const {
    const auto behind = [&](size_t at) { return text_.find_first_not_of(" \t\n", at); };
    for (size_t at = 0; (at = text_.find(".func", at)) != std::string::npos; at++) {
        size_t start = behind(at + 5);
        if (text_[start] == '(') start = behind(text_.find(')', start) + 1);  // its result
        const size_t end = text_.find_first_of("( \t\n{;", start), body = text_.find('{', end);
        if (text_.substr(start, end - start) == name && body < text_.find(';', end)) return body;
    }
    fail("a call of the unknown function " + name);
}

// "(result), name, (parameters)"; the result is optional. Arguments are .param variables of the caller (the manual, "Function declarations").
void Decoder::call(Instruction &i, const Texts &arguments) {
    const auto inside = [](const std::string &list) { return split(list.substr(1, list.size() - 2), ','); };
    const bool returns = arguments.at(0)[0] == '(';
    const std::string &name = arguments.at(returns);
    const Texts results = returns ? inside(arguments[0]) : Texts(),
                parameters = arguments.size() > size_t(1 + returns) ? inside(arguments.back()) : Texts();
    Texts all = results;
    all.insert(all.end(), parameters.begin(), parameters.end());
    for (const std::string &a : all)
        if (!passed_.count(a)) fail("an argument that is not a .param variable: " + a);
    if (all_forms().count("call " + name)) return compute(i, "call " + name, all);
    if (i.guard >= 0) fail("a call under a predicate");
    const auto around = std::tuple(suffix_, line_, passed_);
    for (size_t n = 0; n < parameters.size(); n++) passed_[name + format("_param_%zu", n)] = passed_.at(parameters[n]);
    if (returns) passed_["func_retval0"] = passed_.at(results.at(0));
    suffix_ = format("@%d", ++calls_);
    body(function(name));
    scopes_.back().labels["return" + suffix_] = int(kernel_.code.size());
    std::tie(suffix_, line_, passed_) = around;
}

// A branch goes to the label in the innermost scope around it that has one.
void Decoder::close_scope() {
    const Scope closed = std::move(scopes_.back());
    scopes_.pop_back();
    for (const auto &[at, label] : closed.branches) {
        if (const auto found = closed.labels.find(label); found != closed.labels.end()) kernel_.code[at].target = found->second;
        else if (!scopes_.empty()) scopes_.back().branches.emplace_back(at, label);
        else line_ = kernel_.code[at].line, fail("there is no label " + label);
    }
}

void Decoder::statement(const std::string &s) {
    if (s.rfind(".reg", 0) == 0) return declare(s);
    if (s.rfind(".pragma", 0) == 0) return;
    if (s.rfind(".param", 0) == 0) {  // ".param .b64 param0"
        if (s.back() == ']') fail("an argument that is an array: " + s);
        const auto [type, names] = type_and_names(s.substr(6));
        for (const std::string &name : names) passed_[name] = new_slot(width_of(type));
        return;
    }
    if (s.rfind(".shared", 0) == 0 || s.rfind(".local", 0) == 0) {
        for (Variable &v : variables(s)) v.line = line_, scopes_.back().variables[v.name] = std::move(v);
        return;
    }
    if (s[0] == '.') fail("unknown directive " + s);
    instruction(s);
}

// ".reg .b32 %r<80>" or ".reg .b64 %tmp"
void Decoder::declare(const std::string &s) {
    const auto [type, names] = type_and_names(s.substr(4));
    for (const std::string &name : names) {
        const size_t count = name.find('<');
        std::string known = name.substr(0, count);
        if (count == std::string::npos) known = scopes_.back().registers[name] = name + format("#%d", ++scopes_seen_);
        types_[known + suffix_] = type;
    }
}

// ---- instructions -----------------------------------------------------------------------------------------------------------------

// "@!%p1 name arguments"
void Decoder::instruction(const std::string &s) {
    Instruction i;
    i.line = line_;
    std::string rest = s;
    if (s[0] == '@') {
        const size_t end = s.find_first_of(" \t");
        i.guard_negated = s[1] == '!';
        i.guard = slot(s.substr(1 + i.guard_negated, end - 1 - i.guard_negated), 0);
        rest = strip(s.substr(end));
    }
    const size_t end = std::min(rest.find_first_of(" \t\n"), rest.size());
    std::string name = rest.substr(0, end);
    Texts arguments = split(rest.substr(end), ',');
    if (name.find("cache_hint") != std::string::npos) arguments.pop_back();
    name = plain(name);
    for (std::string &a : arguments)
        if (name.find(".param.") == 2 && a[0] == '[' && passed_.count(address(a).first))
            a = address(a).first, name.replace(0, 8, "mov");
    if (name == "call" || name == "call.uni") {
        call(i, arguments);
        if (!i.run) return;  // the function's body has been decoded in place
    } else if (name == "bra" || name == "bra.uni" || name == "ret" || name == "exit" || name == "bar.sync" ||
               name == "bar.arrive" || name.rfind("bar.red", 0) == 0)
        control(i, name, arguments);
    else if (name.rfind("wgmma.mma_async", 0) == 0) product(i, name, arguments);
    else compute(i, name, arguments);
    kernel_.code.push_back(i);
    kernel_.text.push_back(s);
}

void Decoder::control(Instruction &i, const std::string &name, const Texts &arguments) {
    if (name.rfind("bra", 0) == 0) {
        i.control = Control::branch;
        scopes_.back().branches.emplace_back(kernel_.code.size(), arguments.at(0));
    } else if (name.rfind("bar.red", 0) == 0 && arguments.size() >= 3) {  // result, barrier, threads if given, predicate
        i.control = Control::barrier;
        const bool counts = name == "bar.red.popc.u32", all = name == "bar.red.and.pred";
        if (!counts && !all && name != "bar.red.or.pred") fail("unknown instruction " + name);
        i.reduction = counts ? Reduction::popc : all ? Reduction::all : Reduction::any;
        for (size_t n = 1; n + 1 < arguments.size(); n++) i.operands[i.reads++] = slot(arguments[n], 4);
        i.operands[2] = slot(arguments.back(), 0), i.operands[3] = slot(arguments[0], counts ? 4 : 0);
    } else if (name.rfind("bar", 0) == 0) {
        i.control = name == "bar.sync" ? Control::barrier : Control::arrival;
        for (const std::string &a : arguments) i.operands[i.reads++] = slot(a, 4);
    } else if (!suffix_.empty()) {
        i.control = Control::branch;
        scopes_.back().branches.emplace_back(kernel_.code.size(), "return" + suffix_);
    } else i.control = Control::leave;
}

void Decoder::compute(Instruction &i, const std::string &name, const Texts &arguments) {
    const Texts operands = operand_texts(name, arguments, i);
    std::string full = form_name(name, arguments);
    const bool extremum = name.rfind("max.", 0) == 0 || name.rfind("min.", 0) == 0;
    if (name.rfind("mbarrier.", 0) == 0 || name.rfind("shfl.", 0) == 0 || (extremum && operands.size() == 4))
        full += format(" %zu", operands.size());
    auto found = all_forms().find(full);
    const size_t ftz = full.find(".ftz");
    const bool flushed = found == all_forms().end() && ftz != std::string::npos;
    if (flushed) found = all_forms().find(full.erase(ftz, 4));
    if (found == all_forms().end() || found->second.widths.size() != operands.size() || (flushed && !found->second.flushed))
        fail("unknown instruction " + name + " with " + std::to_string(operands.size()) + " operands");
    const Form &form = found->second;
    if (kernel_.architecture < form.architecture)
        fail(format("%s needs sm_%d, and the PTX is for sm_%d\n  fix: compile for -arch=sm_%d, or avoid it by __CUDA_ARCH__",
                    name.c_str(), form.architecture, kernel_.architecture, form.architecture));
    i.run = flushed ? form.flushed : form.run, i.move = form.move, i.pipe = form.pipe, i.vector = form.vector;
    i.machine = machine_instructions(name.find(".approx") == std::string::npos ? full : name);  // with .ftz these need no scaling
    if (full == "ex2.approx.ftz.bf16x2") i.work = 2;
    if (form.pipe == Pipe::tensor) i.flop = 2 * 16 * 8 * 16;  // mma.m16n8k16
    if (form.bytes) i.bytes = form.bytes;
    i.constant = full.find(".nc") != std::string::npos;
    i.writes = form.writes, i.reads = uint8_t(operands.size() - form.writes);
    for (size_t n = 0; n < operands.size(); n++) i.operands[n] = slot(operands[n], form.widths[n]);
    if (full.find(".async.bulk") != std::string::npos) kernel_.uses_tma = true;
    if (i.pipe == Pipe::shared && i.bytes) kernel_.cell_bytes = std::min<int>(kernel_.cell_bytes, i.bytes * i.vector);
}

// "wgmma.mma_async.sync.aligned.m64n128k16...". Its 64 accumulators are not stored as operands.
void Decoder::product(Instruction &i, const std::string &name, Texts arguments) {
    const size_t shape = name.find(".m64n") + 1, k = name.find('k', shape);
    for (const std::string &part : split(arguments.at(0).substr(1, arguments[0].size() - 2), ','))
        i.accumulators.push_back(slot(part, 4));
    const size_t n = shape ? std::stoul(name.substr(shape + 4)) : 0;
    if (!n || n % 8 || n > 256 || i.accumulators.size() != n / 2)
        fail(format("%s with %zu accumulators", name.c_str(), i.accumulators.size()));
    arguments.erase(arguments.begin());
    compute(i, name.substr(0, shape) + name.substr(k) + (arguments.at(0)[0] == '{' ? " registers" : ""), arguments);
    i.work = float(n) / 8;
    i.flop = uint32_t(2 * 16 * n * std::stoul(name.substr(k + 1)));
    kernel_.uses_wgmma = true;
}

// Returns the operands one by one: with lists expanded, addresses without brackets and offsets, and without the arguments that modify the
// instruction.
Decoder::Texts Decoder::operand_texts(const std::string &name, const Texts &arguments, Instruction &i) const {
    Texts operands;
    int addresses = 0;
    for (const std::string &a : arguments) {
        if (a[0] == '[' && a.find('{') != std::string::npos) {  // a tensor map and coordinates
            const Texts parts = split(a.substr(1, a.size() - 2), ',');
            std::tie(operands.emplace_back(), i.offsets[addresses++]) = address("[" + parts.at(0) + "]");
            for (const std::string &part : split(parts.at(1).substr(1, parts[1].size() - 2), ',')) operands.push_back(part);
        } else if (a[0] == '{') {
            for (const std::string &part : split(a.substr(1, a.size() - 2), ',')) operands.push_back(part);
        } else if (a[0] == '[') {
            std::tie(operands.emplace_back(), i.offsets[addresses++]) = address(a);
        } else
            for (const std::string &part : split(a, '|')) operands.push_back(part);
    }
    if (name == "cp.async.wait_all") i.offsets[0] = -1;  // also waits for uncommitted copies
    else if (name == "cp.async.wait_group") {
        i.offsets[0] = std::stoll(operands.at(0));
        operands.clear();
    } else if (name.rfind("cp.async.c", 0) == 0 && operands.size() >= 3) {  // bytes written, and bytes read if given
        i.bytes = uint8_t(std::stoi(operands[2]));
        if (operands.size() == 4) operands.erase(operands.begin() + 2);
    }
    return operands;
}

// Some names have several forms: for halves of registers, and for registers wider than the loaded value.
std::string Decoder::form_name(const std::string &name, const Texts &arguments) const {
    if (name.rfind("mov", 0) == 0 && arguments.at(0)[0] == '{') return name + " unpack";
    if (name.rfind("mov", 0) == 0 && arguments.at(1)[0] == '{') return name + " pack";
    if (name.rfind("ld.", 0) == 0 || name.rfind("st.", 0) == 0) {
        const std::string &value = arguments.at(name[0] == 'l' ? 0 : 1),
                          first = split(value[0] == '{' ? value.substr(1, value.size() - 2) : value, ',').at(0);
        const int width = register_type(first) ? register_width(first) : 0, memory = width_of(name.substr(name.rfind('.') + 1));
        if (width > memory) return name + " " + std::to_string(width);
    }
    return name;
}

// ---- operands ---------------------------------------------------------------------------------------------------------------------

int Decoder::slot(const std::string &s, int width) {
    if (s == "_") return sink_ < 0 ? sink_ = new_slot(8) : sink_;                     // never read
    if (s == "%globaltimer" || s.rfind("%clock", 0) == 0) return constant(0, width);  // time stands still
    if (s[0] == '%' || s == "WARP_SZ" || register_type(s)) return register_slot(s, width);
    if (s[0] == '0' && (s[1] == 'f' || s[1] == 'd')) return constant(std::stoull(s.substr(2), nullptr, 16), s[1] == 'f' ? 4 : 8);
    if ((isdigit(s[0]) || s[0] == '-') && s.find('.') != std::string::npos)
        return width == 8 ? constant(std::bit_cast<uint64_t>(std::stod(s)), 8)
                          : constant(std::bit_cast<uint32_t>(std::stof(s)), 4);
    if (isdigit(s[0]) || s[0] == '-') {
        uint64_t bits = s[0] == '-' ? uint64_t(std::stoll(s, nullptr, 0)) : std::stoull(s, nullptr, 0);
        if (width == 0) return constant(bits ? ~0u : 0, 4);
        if (width < 8) bits &= (uint64_t(1) << 8 * width) - 1;
        return constant(bits, width);
    }
    if (const auto passed = passed_.find(s); passed != passed_.end()) return passed->second;
    const std::string parameter = kernel_.mangled + "_param_";
    if (s.rfind(parameter, 0) == 0)
        return constant(param_window + kernel_.parameters.at(std::stoul(s.substr(parameter.size()))).offset, 8);
    const size_t plus = s.find('+');
    if (const Variable *v = variable(strip(s.substr(0, plus))))
        return place(*v, plus == std::string::npos ? 0 : std::stoull(s.substr(plus + 1)), width);
    fail("unknown name " + s);
}

const Variable *Decoder::variable(const std::string &name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); scope++)
        if (const auto found = scope->variables.find(name); found != scope->variables.end()) return &found->second;
    const auto found = variables_.find(name);
    return found == variables_.end() ? nullptr : &found->second;
}

// Returns a slot with the address in a variable. A variable is placed in shared or local memory at its first use in the kernel. Dynamic shared memory
// follows the static part, at an address that is known at the end.
int Decoder::place(const Variable &v, uint64_t offset, int width) {
    if (v.memory) {
        if (!v.unknown.empty()) fail(v.name + " has the unknown initial value " + v.unknown);
        return constant(uint64_t(v.memory.get()) + offset, width);
    }
    if (v.bytes == 0) {
        dynamic_align_ = std::max({dynamic_align_, v.align, size_t(16)});
        dynamic_presets_.push_back(kernel_.presets.size());
        const int slot = new_slot(width);
        kernel_.presets.push_back({slot, width, offset, ""});
        return slot;
    }
    const auto [at, fresh] = placed_.try_emplace({v.line, v.name}, 0);
    if (fresh) {
        size_t &end = v.space == "shared" ? kernel_.static_shared : kernel_.local_bytes;
        const size_t begin = round_up(end, v.align);
        end = begin + v.bytes;
        at->second = v.space == "shared" ? shared_base + begin : local_window + begin;
    }
    return constant(at->second + offset, width);
}

int Decoder::register_slot(const std::string &name, int width) {
    if (is_special(name)) {
        const auto [at, fresh] = specials_.try_emplace(name, 0);
        if (width != 4) fail(name + " has 32 bits");
        if (fresh) at->second = new_slot(4), kernel_.presets.push_back({at->second, 4, 0, name});
        return at->second;
    }
    const int own = register_width(name);
    if (own != width) fail(format("%s has %d bits, not %d", name.c_str(), 8 * own, 8 * width));
    const auto [at, fresh] = registers_.try_emplace(in_scope(name) + suffix_, 0);
    if (fresh) at->second = new_slot(own);
    return at->second;
}

int Decoder::constant(uint64_t bits, int width) {
    const auto [at, fresh] = constants_.try_emplace({bits, width}, 0);
    if (fresh) at->second = new_slot(width), kernel_.presets.push_back({at->second, width, bits, ""});
    return at->second;
}

int Decoder::new_slot(int width) {
    const int first = kernel_.slots;
    kernel_.slots += width == 8 ? 2 : 1;
    return first;
}

std::string Decoder::in_scope(const std::string &name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); scope++)
        if (const auto found = scope->registers.find(name); found != scope->registers.end()) return found->second;
    return name;
}

const std::string *Decoder::register_type(std::string name) const {
    name = in_scope(name);
    for (const std::string &known : {name, name.substr(0, name.find_first_of("0123456789"))})
        if (const auto found = types_.find(known + suffix_); found != types_.end()) return &found->second;
    return nullptr;
}

int Decoder::register_width(const std::string &name) const {
    const std::string *type = register_type(name);
    if (!type) fail("unknown register " + name);
    return width_of(*type);
}
}  // namespace ptx
