// What of the trainers' PTX the interpreter knows, and what the tests of this program have run of it. PTX_TEXTS, in the environment, names
// the files.
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "../../../dev/cuda/ptx/runtime.h"

namespace {

std::vector<std::string> shipped() {
    const char *const names = getenv("PTX_TEXTS");
    std::istringstream in(names ? names : "");
    return {std::istream_iterator<std::string>(in), {}};
}

// At the end of a run of all tests every kernel that ships must have run.
class Coverage : public testing::Environment {
    void TearDown() override {
        std::set<std::string> launched;
        double threads = 0, seconds = 0;
        for (const ptx::Launches &l : ptx::launched())
            launched.insert(l.mangled), threads += double(l.total().threads), seconds += l.seconds;
        if (launched.empty()) return;
        if (ptx::counting) ptx::print_counts();
        printf("PTX: %zu kernels, %.3g thread instructions, %.0f million a second\n", launched.size(), threads,
               threads / seconds * 1e-6);
        for (const std::string &path : shipped()) {
            const auto entries = ptx::Module::read(path).entries();
            size_t ran = 0;
            for (const std::string &entry : entries)
                if (launched.count(entry)) ran++;
                else if (GTEST_FLAG_GET(filter) == "*") ADD_FAILURE() << path << ": no test runs " << entry;
            printf("  %zu of the %zu kernels in %s have run\n", ran, entries.size(), path.c_str());
        }
    }
};
[[maybe_unused]] testing::Environment *const coverage = testing::AddGlobalTestEnvironment(new Coverage);

}  // namespace

TEST(PtxShipped, EveryInstructionIsKnown) {
    if (shipped().empty()) GTEST_SKIP() << "PTX_TEXTS names no files";
    for (const std::string &path : shipped()) {
        ptx::Module module = ptx::Module::read(path);
        EXPECT_FALSE(module.entries().empty()) << path;
        for (const std::string &entry : module.entries()) EXPECT_FALSE(module.kernel(entry).code.empty()) << entry;
    }
}
