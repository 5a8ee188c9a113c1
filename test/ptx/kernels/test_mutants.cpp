// Bugs that only nvcc's output can have, made in the PTX of attention: each must be noticed, as a wrong result or by the interpreter.
#include <gtest/gtest-spi.h>

#include "../../../dev/emulator/ptx/runtime.h"
#include "../../../llmc/ops/attention.cuh"
#include "../../cuda/check.cuh"
#include "../../reference_attention.h"
#include "../mutations.h"

namespace {

// Forward and backward of bf16 against the reference, small. What was wrong, empty if nothing was.
std::string attention_is_wrong() {
    const ptx::OtherGpu ampere(80);  // Hopper's kernels: test_attention_hopper.cpp
    const AttentionCase a{{5, 90, 33}, 0, 2, 1, 64};
    const AttentionValues<bf16> in(a);
    testing::TestPartResultArray failures;
    const testing::ScopedFakeTestPartResultReporter intercept(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    try {
        check_attention("attention", a, in, run_attention<DeviceArray>(CudaBf16{}, a, in));
    } catch (const Error &error) {
        return error.what();
    }
    return failures.size() ? "a wrong result" : "";
}

// The n-th list in braces, and its registers changed places: "{%r1,%r2}" -> "{%r2,%r1}".
void swap_in_list(std::string &line, int list, size_t first, size_t second) {
    size_t open = line.find('{');
    while (list--) open = line.find('{', open + 1);
    const size_t close = line.find('}', open);
    Lines registers;
    for (size_t at = open + 1; at < close;) {
        const size_t end = std::min(line.find(',', at), close);
        registers.push_back(line.substr(at, end - at));
        at = end + 1;
    }
    std::swap(registers.at(first), registers.at(second));
    std::string joined;
    for (const std::string &r : registers) joined += (joined.empty() ? "" : ",") + r;
    line.replace(open + 1, close - open - 1, joined);
}
// A line goes down behind the next that holds `what`: a compiler may do that where the assembly does not say that it touches memory.
void move_behind(Lines &lines, size_t n, const std::string &what) {
    size_t to = n + 1;
    while (to < lines.size() && !contains(lines[to], what)) to++;
    if (to < lines.size()) std::rotate(lines.begin() + long(n), lines.begin() + long(n) + 1, lines.begin() + long(to) + 1);
}

struct Bug {
    const char *name, *line;
    Change change;
};
const Bug bugs[] = {
    {"mma: the registers of B swapped", "mma.sync", [](Lines &l, size_t n) { swap_in_list(l[n], 2, 0, 1); }},
    {"mma: two registers of A swapped", "mma.sync", [](Lines &l, size_t n) { swap_in_list(l[n], 1, 1, 2); }},
    {"mma: two sums swapped", "mma.sync", [](Lines &l, size_t n) { swap_in_list(l[n], 0, 0, 1); }},
    {"ldmatrix without .trans", ".trans.", replaced(".trans", "")},
    {"ldmatrix: two matrices swapped", "ldmatrix", [](Lines &l, size_t n) { swap_in_list(l[n], 0, 1, 2); }},
    {"wait_group 1 instead of 0", "wait_group 0", replaced("_group 0", "_group 1")},
    {"wait_group behind the ldmatrix", "wait_group", [](Lines &l, size_t n) { move_behind(l, n, "ldmatrix"); }},
    {"no commit_group", "commit_group", erase},
    {"no bar.sync", "bar.sync", erase},
    {"cp.async of 8 bytes", "cp.async.cg", replaced("], 16,", "], 8,")},
    {"halves of a bf16x2 swapped", "cvt.rn.bf16x2",
     [](Lines &l, size_t n) {  // "cvt... %r1, %f2, %f3;"
         std::string &s = l[n];
         const size_t first = s.find(", ") + 2, comma = s.find(", ", first), end = s.find(';');
         s = s.substr(0, first) + s.substr(comma + 2, end - comma - 2) + ", " + s.substr(first, comma - first) + ";";
     }},
    {"shuffles with another lane", "shfl.sync.bfly", replaced("bfly", "up")},
};

}  // namespace

TEST(PtxMutants, NoneInWhatNvccMade) { EXPECT_EQ(attention_is_wrong(), ""); }

TEST(PtxMutants, AreNoticed) {
    for (const Bug &bug : bugs) {
        size_t changed = 0;
        const ptx::EditedPtx edited([&](std::string &text) {
            if (!contains(text, "attention_forward_kernel")) return false;
            changed += change_lines(text, bug.line, true, bug.change);
            return true;
        });
        const std::string noticed = attention_is_wrong();
        printf("  %-36s %5zu lines: %s\n", bug.name, changed, noticed.substr(0, noticed.find('\n')).c_str());
        EXPECT_GT(changed, 0u) << bug.name;
        EXPECT_NE(noticed, "") << bug.name;
    }
}
