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

// Every line that holds `what` becomes what `change` makes of it.
bool each_line(std::string &text, const std::string &what, const Change &change) {
    if (!contains(text, "attention_forward_kernel")) return false;
    change_lines(text, what, true, change);
    return true;
}

// Applies `change` to the middle one of a kernel's lines that contain `what`. Returns the line's number, 0 for none.
size_t one_line(std::string &text, const std::string &kernel, const std::string &what, const Change &change) {
    Lines lines = lines_of(text);
    size_t begin = 0;
    while (begin < lines.size() && !(contains(lines[begin], ".entry") && contains(lines[begin], kernel))) begin++;
    std::vector<size_t> found;
    for (size_t n = begin; n < lines.size() && lines[n] != "}"; n++)
        if (contains(lines[n], what)) found.push_back(n);
    if (found.empty()) return 0;
    const size_t chosen = found[found.size() / 2];
    const std::string before = lines[chosen];
    change(lines, chosen);
    EXPECT_NE(lines[chosen], before);
    text = text_of(lines);
    return chosen + 1;
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
    {"ldmatrix without .trans", ".trans.", [](Lines &l, size_t n) { replace(l[n], ".trans", ""); }},
    {"ldmatrix: two matrices swapped", "ldmatrix", [](Lines &l, size_t n) { swap_in_list(l[n], 0, 1, 2); }},
    {"wait_group 1 instead of 0", "wait_group 0", [](Lines &l, size_t n) { replace(l[n], "_group 0", "_group 1"); }},
    {"wait_group behind the ldmatrix", "wait_group", [](Lines &l, size_t n) { move_behind(l, n, "ldmatrix"); }},
    {"no commit_group", "commit_group", [](Lines &l, size_t n) { l[n].clear(); }},
    {"no bar.sync", "bar.sync", [](Lines &l, size_t n) { l[n].clear(); }},
    {"cp.async of 8 bytes", "cp.async.cg", [](Lines &l, size_t n) { replace(l[n], "], 16,", "], 8,"); }},
    {"halves of a bf16x2 swapped", "cvt.rn.bf16x2",
     [](Lines &l, size_t n) {  // "cvt... %r1, %f2, %f3;"
         std::string &s = l[n];
         const size_t first = s.find(", ") + 2, comma = s.find(", ", first), end = s.find(';');
         s = s.substr(0, first) + s.substr(comma + 2, end - comma - 2) + ", " + s.substr(first, comma - first) + ";";
     }},
    {"shuffles with another lane", "shfl.sync.bfly", [](Lines &l, size_t n) { replace(l[n], "bfly", "up"); }},
};

// A single line of a kernel, as a slip of a compiler or of a hand would change it. One of the eight has no wrong result: softmax does not depend
// on the term subtracted from its exponents, as long as nothing overflows.
const char *const harmless = "one maximum is a minimum";
const Bug slips[] = {
    {"one mma without its sums", "mma.sync",
     [](Lines &l, size_t n) {
         std::string &s = l[n];
         const std::string zero = "0f00000000";
         s.replace(s.rfind('{'), s.rfind('}') - s.rfind('{') + 1, "{" + zero + "," + zero + "," + zero + "," + zero + "}");
     }},
    {"one ldmatrix 16 bytes further", "ldmatrix", [](Lines &l, size_t n) { l[n].insert(l[n].find(']'), "+16"); }},
    {"one maximum is a minimum", "max.f32", [](Lines &l, size_t n) { replace(l[n], "max", "min"); }},
    {"one exponential left out", "ex2.approx", [](Lines &l, size_t n) { replace(l[n], "ex2.approx.ftz", "mov"); }},
    {"one shuffle up instead of across", "shfl.sync.bfly", [](Lines &l, size_t n) { replace(l[n], "bfly", "up"); }},
    {"one comparison off by one", "setp.gt.s32", [](Lines &l, size_t n) { replace(l[n], ".gt.", ".ge."); }},
    {"one bar.sync less", "bar.sync", [](Lines &l, size_t n) { l[n].clear(); }},
    {"one cp.async from 16 bytes further", "cp.async.cg", [](Lines &l, size_t n) { l[n].insert(l[n].rfind(']'), "+16"); }},
};

}  // namespace

TEST(PtxMutants, NoneInWhatNvccMade) { EXPECT_EQ(attention_is_wrong(), ""); }

TEST(PtxMutants, AreNoticed) {
    for (const Bug &bug : bugs) {
        size_t changed = 0;
        const ptx::EditedPtx edited([&](std::string &text) {
            return each_line(text, bug.line, [&](Lines &lines, size_t n) { bug.change(lines, n), changed++; });
        });
        const std::string noticed = attention_is_wrong();
        printf("  %-36s %5zu lines: %s\n", bug.name, changed, noticed.substr(0, noticed.find('\n')).c_str());
        EXPECT_GT(changed, 0u) << bug.name;
        EXPECT_NE(noticed, "") << bug.name;
    }
}

// A slip may be harmless at one place (a mask of keys that another comparison hides, too), and is noticed in one kernel at least.
TEST(PtxMutants, SingleLinesAreNoticed) {
    const std::pair<const char *, const char *> kernels[] = {{"forward", "attention_forward_kernel5ILi64E4bf16"},
                                                             {"queries", "attention_backward_queries_kernel4ILi64E4bf16"},
                                                             {"keys", "attention_backward_keys_kernel4ILi64ELb0E"}};
    for (const Bug &slip : slips) {
        size_t noticed_in = 0;
        for (const auto &[what, kernel] : kernels) {
            size_t line = 0;
            const ptx::EditedPtx edited([&](std::string &text) {
                const size_t changed = one_line(text, kernel, slip.line, slip.change);
                line = std::max(line, changed);
                return changed != 0;
            });
            const std::string noticed = attention_is_wrong();
            printf("  %-36s %-8s line %5zu: %s\n", slip.name, what, line,
                   noticed.empty() ? line ? "not noticed" : "no such line" : noticed.substr(0, noticed.find('\n')).c_str());
            noticed_in += !noticed.empty();
        }
        EXPECT_EQ(noticed_in > 0, std::string(slip.name) != harmless) << slip.name;
    }
}
