// The form of error messages: of limited length, without control characters, with their fix.
#include "errors.h"

TEST(Messages, KeepTheirFixAndFourKilobytes) {
    const std::string fix = "\n  fix: correct it";
    const auto repeated = [](const std::string &text, size_t count) {
        std::string out;
        while (count--) out += text;
        return out;
    };
    struct {
        std::string text, shown;  // shown: "" for any text
    } const cases[] = {
        {"x: is missing" + fix, "x: is missing" + fix},
        {std::string("a\0b\x1b[2J\r\x7f\t", 10) + "\xc3\xa9" + fix, "a\\x00b\\x1b[2J\\x0d\\x7f\t\xc3\xa9" + fix},
        {"\xff \xc3 \xc0\xaf \xc2\x85 \xe2\x82" + fix, "\\xff \\xc3 \\xc0\\xaf \\xc2\\x85 \\xe2\\x82" + fix},
        {"a " + repeated("\xc3\xa9", 5000) + " b" + fix,
         "a " + repeated("\xc3\xa9", 255) + " ... (9020 bytes) ... " + repeated("\xc3\xa9", 235) + " b" + fix},
        {repeated("line\n", 1000000) + "the last" + fix, ""},
        {repeated(repeated("x", 1500) + "\n", 9) + "the last" + fix, ""},
    };
    for (const auto &[text, shown] : cases) {
        const std::string found = error_of([&text = text] { throw Error(text); });
        EXPECT_LE(found.size(), 4096u);
        EXPECT_TRUE(found.ends_with(fix)) << found;
        if (!shown.empty()) EXPECT_EQ(found, shown);
        else expect_contains(found, {"lines)", "\nthe last\n"});
        EXPECT_EQ(presentable(found), found);
    }
}

TEST(Messages, OfTheStandardLibraryGetAFix) {
    expect_contains(
        message_of(std::filesystem::filesystem_error("x", "DIR", std::make_error_code(std::errc::too_many_symbolic_link_levels))),
        {"DIR: Too many levels of symbolic links\n  fix: give a path"});
    expect_contains(message_of(std::bad_alloc()), {"more memory", "\n  fix: "});
    expect_contains(message_of(std::out_of_range("index 7")), {"index 7\n  fix: "});
    expect_contains(message_of(Error("a cause\n  fix: do it")), {"a cause\n  fix: do it"});
}
