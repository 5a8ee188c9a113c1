// Finds where the paths of a branch join again, the nearest post-dominator (Cooper, Harvey, Kennedy: "A Simple, Fast Dominance Algorithm").
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "kernel.h"

namespace ptx {
namespace {

using Edges = std::vector<std::vector<int>>;

Edges successors(const std::vector<Instruction> &code) {  // code.size() is the end
    const int end = int(code.size());
    Edges after(code.size() + 1);
    for (int n = 0; n < end; n++) {
        const Instruction &i = code[size_t(n)];
        if (i.control == Control::leave) after[size_t(n)].push_back(end);
        if (i.control == Control::branch) after[size_t(n)].push_back(i.target);
        const bool always = i.guard < 0 && (i.control == Control::leave || i.control == Control::branch);
        if (!always) after[size_t(n)].push_back(n + 1);
    }
    return after;
}

// Returns all instructions that can reach the end, in the order of a backward depth-first search from the end.
std::vector<int> walk_back(const Edges &after) {
    Edges before(after.size());
    for (size_t n = 0; n < after.size(); n++)
        for (int next : after[n]) before[size_t(next)].push_back(int(n));
    const int end = int(after.size()) - 1;
    std::vector<int> order;
    std::vector<bool> seen(after.size());
    std::vector<std::pair<int, size_t>> stack = {{end, 0}};
    seen[size_t(end)] = true;
    while (!stack.empty()) {
        auto &[n, next] = stack.back();
        if (next < before[size_t(n)].size()) {
            const int from = before[size_t(n)][next++];
            if (!seen[size_t(from)]) seen[size_t(from)] = true, stack.emplace_back(from, 0);
        } else {
            order.push_back(n);
            stack.pop_back();
        }
    }
    return {order.rbegin(), order.rend()};
}
}  // namespace

std::vector<int> joins(const std::vector<Instruction> &code) {
    const Edges after = successors(code);
    const std::vector<int> order = walk_back(after);
    std::vector<int> rank(after.size(), -1), join(after.size(), -1);
    for (size_t n = 0; n < order.size(); n++) rank[size_t(order[n])] = int(n);
    const auto meet = [&](int a, int b) {  // the first common instruction on the paths to the end
        while (a != b) {
            while (rank[size_t(a)] > rank[size_t(b)]) a = join[size_t(a)];
            while (rank[size_t(b)] > rank[size_t(a)]) b = join[size_t(b)];
        }
        return a;
    };
    join.back() = int(code.size());
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t n = 1; n < order.size(); n++) {  // skips the end itself
            int found = -1;
            for (int next : after[size_t(order[n])])
                if (join[size_t(next)] >= 0) found = found < 0 ? next : meet(found, next);
            if (found != join[size_t(order[n])]) join[size_t(order[n])] = found, changed = true;
        }
    }
    join.pop_back();
    return join;
}

namespace {

bool is_word_load(const Instruction &i) {
    return i.pipe == Pipe::shared && i.move && i.writes == 1 && i.bytes == 4 && i.vector == 1 && i.guard < 0;
}

// Joins loads of consecutive words with the same address register.
void join_group(std::vector<Instruction> &code, std::map<int64_t, size_t> &by_offset) {
    for (auto first = by_offset.begin(); first != by_offset.end();) {
        Instruction &load = code[first->second];
        int words = 0;
        const int64_t begin = first->first;
        for (; first != by_offset.end() && first->first == begin + 4 * words && words < 64; ++first, words++)
            code[first->second].joined = code[first->second].machine = 0;
        load.joined = uint8_t(words);
        each_wide_load(uint32_t(begin / 4), uint32_t(words), [&](uint32_t, uint32_t) { load.machine++; });
    }
    by_offset.clear();
}
}  // namespace

void join_loads(std::vector<Instruction> &code) {
    std::set<int> targets;
    for (const Instruction &i : code)
        if (i.control == Control::branch) targets.insert(i.target);
    std::map<int, std::map<int64_t, size_t>>
        loads;  // by address register and offset: the loads since the last store, within a basic block
    const auto join_all = [&] {
        for (auto &[slot, by_offset] : loads) join_group(code, by_offset);
        loads.clear();
    };
    for (size_t n = 0; n < code.size(); n++) {
        const Instruction &i = code[n];
        if (targets.contains(int(n))) join_all();
        if (is_word_load(i)) loads[i.operands[1]].emplace(i.offsets[0], n);
        else if (i.control != Control::none || (i.writes == 0 && i.pipe != Pipe::integer)) join_all();
        for (int w = 0; w < i.writes; w++)
            if (const auto found = loads.find(i.operands[w]); found != loads.end()) join_group(code, found->second);
    }
    join_all();
}

int number_looped_loads(std::vector<Instruction> &code) {
    int number = 0;
    for (int n = 0, first = 0; n < int(code.size()); n++) {  // first: beginning of the basic block, if no branch jumps into it
        const Instruction &end = code[size_t(n)];
        if (end.control == Control::none) continue;
        const bool loop = end.control == Control::branch && end.target >= first && end.target < n;
        const auto begin = code.begin() + (loop ? end.target : n);
        const auto stores = [](const Instruction &i) { return i.pipe == Pipe::shared && !i.writes; };
        if (std::none_of(begin, code.begin() + n, stores))
            std::for_each(begin, code.begin() + n, [&](Instruction &i) {
                if (is_word_load(i) && (i.joined == 1 || i.joined == 2)) i.looped = number++;
            });
        first = n + 1;
    }
    return number;
}

// Returns true if the loop's predicate compares a counter to which each iteration adds a constant.
static bool counts_by_constant(const std::vector<Instruction> &code, const Instruction &branch, int n,
                               const std::set<int> &constants) {
    const auto of_loop = [&](auto f) { return std::any_of(code.begin() + branch.target, code.begin() + n, f); };
    const auto writes = [](const Instruction &i, int slot) { return std::count(i.operands, i.operands + i.writes, slot) > 0; };
    return of_loop([&](const Instruction &compares) {
        if (!writes(compares, branch.guard)) return false;
        const int *inputs = compares.operands + compares.writes;
        return std::any_of(inputs, inputs + compares.reads, [&](int counter) {
            return of_loop([&](const Instruction &i) {
                const int *from = i.operands + i.writes;
                return i.pipe == Pipe::integer && i.reads == 2 && writes(i, counter) &&
                       ((from[0] == counter && constants.contains(from[1])) ||
                        (from[1] == counter && constants.contains(from[0])));
            });
        });
    });
}

void find_machine_blocks(std::vector<Instruction> &code, const std::set<int> &constants) {
    constexpr int most_predicated = 10, most_unrolled = 16;  // instructions
    constexpr uint8_t copies = 4;
    const auto instructions = [&](int first, int end) {  // counted without moves; many if there is a branch or a barrier
        int n = 0;
        for (int at = first; at < end; at++) {
            const Instruction &i = code[size_t(at)];
            if (i.control != Control::none && i.unrolled) return most_unrolled + 1;
            n += i.pipe != Pipe::move;
        }
        return n;
    };
    for (const bool loops : {false, true})  // a loop may contain predicated instructions
        for (int n = 0; n < int(code.size()); n++) {
            Instruction &i = code[size_t(n)];
            if (i.control != Control::branch || i.guard < 0 || loops != (i.target <= n)) continue;
            if (!loops && instructions(n + 1, i.target) <= most_predicated) i.unrolled = 0;
            if (loops && instructions(i.target, n) <= most_unrolled && counts_by_constant(code, i, n, constants))
                i.unrolled = copies;
        }
}
}  // namespace ptx
