// Counts for a ladder program that interprets its PTX (common.h). ptxas's report is a file in the program's directory.
#include <filesystem>
#include <set>

#include "../../cuda/common.h"
#include "report.h"

namespace ptx {
namespace {

struct ThisInterpreter : Interpreter {
    ThisInterpreter() { the_interpreter = this; }

    std::vector<std::string> not_run() const override {
        std::set<std::string> ran;
        for (const Launches &l : launched()) ran.insert(l.mangled);
        std::vector<std::string> missing;
        for (const std::string &kernel : program_kernels())
            if (!ran.count(kernel)) missing.push_back(kernel);
        return missing;
    }
    size_t kernels() const override { return program_kernels().size(); }

    void count(const std::string &what, const std::function<void()> &run, size_t clusters, bool csv) const override {
        static const auto code = read_ptxas(std::filesystem::read_symlink("/proc/self/exe").string() + ".ptxas");
        static const bool first = (print_counts_header(csv), true);
        (void)first;
        forget_launches();
        counting = true, sample = clusters;
        run();
        counting = false, sample = 0;
        print_counts(what, launched(), code, csv);
    }
};
const ThisInterpreter this_interpreter;
}  // namespace
}  // namespace ptx
