// Coverage: the tests must run every kernel in the trainers' PTX files, which are below this program's directory.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "../../../dev/emulator/ptx/report.h"

namespace {

std::vector<std::string> shipped() {
    std::vector<std::string> paths;
    for (const auto &file :
         std::filesystem::recursive_directory_iterator(std::filesystem::read_symlink("/proc/self/exe").parent_path()))
        if (file.path().extension() == ".ptx") paths.push_back(file.path());
    return paths;
}

// At the end, unless a filter selected tests by name, every shipped kernel must have run.
class Coverage : public testing::Environment {
    void TearDown() override {
        std::set<std::string> launched;
        double threads = 0, seconds = 0;
        for (const ptx::Launches &l : ptx::launched())
            launched.insert(l.mangled), threads += double(l.total().threads), seconds += l.seconds;
        if (launched.empty()) return;
        if (ptx::counting) ptx::print_counts_header(false), ptx::print_counts("", ptx::launched(), {}, false);
        printf("PTX: %zu kernels, %.3g thread instructions, %.0f million a second\n", launched.size(), threads,
               threads / seconds * 1e-6);
        const std::string filter = GTEST_FLAG_GET(filter);
        const bool all = filter == "*" || filter[0] == '-';
        for (const std::string &entry : ptx::program_kernels())  // kernels of the unit for sm_90a, which the trainers link
            if (all && entry.find("_hopper_kernel") != entry.npos && !launched.count(entry))
                ADD_FAILURE() << "no test runs " << entry;
        for (const std::string &path : shipped()) {
            const auto entries = ptx::Module::read(path).entries();
            size_t ran = 0;
            for (const std::string &entry : entries)
                if (launched.count(entry)) ran++;
                else if (all) ADD_FAILURE() << path << ": no test runs " << entry;
            printf("  %zu of the %zu kernels in %s have run\n", ran, entries.size(), path.c_str());
        }
    }
};
[[maybe_unused]] testing::Environment *const coverage = testing::AddGlobalTestEnvironment(new Coverage);

}  // namespace

TEST(PtxShipped, EveryInstructionIsKnown) {
    EXPECT_EQ(shipped().size(), 3u);  // both trainers, and the base class of their models
    for (const std::string &path : shipped()) {
        ptx::Module module = ptx::Module::read(path);
        EXPECT_FALSE(module.entries().empty()) << path;
        for (const std::string &entry : module.entries()) EXPECT_FALSE(module.kernel(entry).code.empty()) << entry;
    }
}
