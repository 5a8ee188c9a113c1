// The file that stores the fastest algorithm of each product.
#include "../llmc/ops/algorithm_choices.h"

#include <cstdlib>

#include "../llmc/core/file.h"
#include "errors.h"

namespace {
const AlgorithmChoices::Algorithm one = {1, 0xffffffffffffffff, 3, 4, 5, 6, 7, 8}, other = {9};

struct Choices : TemporaryDirectory {
    Choices() { setenv("XDG_CACHE_HOME", dir.c_str(), 1); }
    ~Choices() override { unsetenv("XDG_CACHE_HOME"); }
};
}  // namespace

TEST_F(Choices, TheFirstRankDecidesForTheOthersAndForLaterRuns) {
    AlgorithmChoices first("a GPU"), second("a GPU");  // both ranks start before either has chosen
    EXPECT_EQ(first.keep("a product", one), one);
    EXPECT_EQ(second.keep("a product", other), one);
    EXPECT_EQ(second.keep("another product", other), other);
    const AlgorithmChoices later("a GPU");
    ASSERT_TRUE(later.find("a product"));
    EXPECT_EQ(*later.find("a product"), one);
    EXPECT_EQ(later.find("a third product"), nullptr);
    EXPECT_EQ(AlgorithmChoices("another GPU").find("a product"), nullptr);
}

TEST_F(Choices, CacheMustBeWritable) {
    EXPECT_TRUE(cache_is_writable());
    put("file", "");
    setenv("XDG_CACHE_HOME", (dir + "/file").c_str(), 1);
    EXPECT_FALSE(cache_is_writable());
}

TEST_F(Choices, DamagedLinesAreNamed) {
    const std::string path = AlgorithmChoices("a GPU").path();
    AlgorithmChoices("a GPU").keep("a product", one);
    for (const char *line :
         {"a product", "a product: 1 2 3 4 5 6 7", "a product: 1 2 3 4 5 6 7 x", "a product: 1 2 3 4 5 6 7 8 9"}) {
        std::ofstream(path) << "a product: 1 2 3 4 5 6 7 8\n" << line << "\n";
        EXPECT_EQ(error_of([] { AlgorithmChoices("a GPU"); }),
                  path + ": line 2 is not a product with its algorithm\n  fix: remove the file; the next run writes a new one");
    }
}
