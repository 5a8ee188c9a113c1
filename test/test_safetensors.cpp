// safetensors: hand-made bytes, every dtype written and read back, and refusals of malformed headers.
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <cstring>

#include "../llmc/core/json.h"
#include "../llmc/io/safetensors.h"
#include "errors.h"

static HostMemory memory;

namespace fs = std::filesystem;

struct Safetensors : TemporaryDirectory {
    const std::string path = dir + "/a.safetensors";

    void put(const std::string &bytes) {
        fs::remove(path);  // truncation waits for the disk on some file systems
        std::ofstream(path, std::ios::binary) << bytes;
    }
    void put(uint64_t header_bytes, const std::string &header, const std::string &data) {
        put(std::string(reinterpret_cast<char *>(&header_bytes), 8) + header + data);
    }
    void put(const std::string &header, const std::string &data) { put(header.size(), header, data); }
    std::string get() {
        std::ifstream in(path, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), {}};
    }
};

template <class T> static std::string bytes_of(const std::vector<T> &v) {
    return {reinterpret_cast<const char *>(v.data()), v.size() * sizeof(T)};
}

TEST_F(Safetensors, ReadsHandMadeBytes) {
    put(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
        R"("b":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]},"c":{"dtype":"F16","shape":[2],"data_offsets":[22,26]},)"
        R"("e":{"dtype":"F32","shape":[0,5],"data_offsets":[16,16]},"s":{"dtype":"U8","shape":[],"data_offsets":[26,27]}}   )",
        bytes_of<float>({1, -2, 3.5f, 1e-40f}) + bytes_of<uint16_t>({0x3f80, 0xc000, 0x7f80}) +
            bytes_of<uint16_t>({0x3c00, 0xc100}) + "\x07");
    const SafetensorsFile file(path);
    EXPECT_EQ(file.metadata(), Metadata({{"format", "pt"}}));
    EXPECT_EQ(file.tensors().size(), 5u);
    EXPECT_EQ(file.expect_shape("a", {2, 2}).bytes, 16u);
    std::vector<float> a(4), b(3), c(2), e;
    file.read("a", a.data()), file.read("b", b.data()), file.read("c", c.data()), file.read("e", e.data());
    EXPECT_EQ(a, std::vector<float>({1, -2, 3.5f, 1e-40f}));
    EXPECT_EQ(b, std::vector<float>({1, -2, INFINITY}));
    EXPECT_EQ(c, std::vector<float>({1, -2.5f}));
    std::vector<bf16> a16(4), c16(2);
    file.read("a", a16.data()), file.read("c", c16.data());
    EXPECT_EQ(float(a16[2]), 3.5f);
    EXPECT_EQ(float(c16[1]), -2.5f);
    float part[2];
    file.read_part("a", 1, 2, part);
    EXPECT_EQ(part[0], -2);
    EXPECT_EQ(part[1], 3.5f);
    expect_error([&] { file.read_part("a", 3, 2, part); }, {path, "\"a\" has 4 elements"});
    expect_error([&] { file.read("s", part); }, {path, "\"s\" is U8"});
    expect_error([&] { file.at("x"); }, {path, "no tensor \"x\""});
    expect_error([&] { file.expect_shape("a", {4}); }, {path, "\"a\" has shape (2, 2), but (4) is needed"});
}

TEST_F(Safetensors, EveryHalfIsExact) {
    std::vector<uint16_t> bits(65536);
    for (size_t i = 0; i < bits.size(); i++) bits[i] = uint16_t(i);
    put(R"({"h":{"dtype":"F16","shape":[65536],"data_offsets":[0,131072]}})", bytes_of(bits));
    std::vector<float> out(bits.size());
    SafetensorsFile(path).read("h", out.data());
    for (size_t i = 0; i < bits.size(); i++) {
        const int exponent = i >> 10 & 31, fraction = i & 1023;
        const double sign = i >> 15 ? -1 : 1;
        const double want = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                           : std::ldexp(fraction, -24);
        if (std::isnan(want)) ASSERT_TRUE(std::isnan(out[i])) << i;
        else ASSERT_EQ(out[i], float(sign * want)) << i;
        ASSERT_EQ(std::signbit(out[i]), sign < 0) << i;
    }
}

TEST_F(Safetensors, LargeTensorsAreConvertedInChunks) {
    const size_t n = (size_t(1) << 20) + 17;  // several chunks and a remainder
    std::vector<float> from(n), to(n);
    for (size_t i = 0; i < n; i++) from[i] = float(i % 251) - 125;  // exact in bf16
    SafetensorsWriter writer(path, {{"x", {n}, "BF16"}});
    writer.write("x", from.data(), memory);
    writer.finish();
    SafetensorsFile(path).read("x", to.data());
    EXPECT_EQ(from, to);
}

TEST_F(Safetensors, WritesEveryType) {
    const std::vector<float> f = {1.5f, 1.00390625f, -0.0f};  // the second is halfway between two bf16, and rounds to even
    const std::vector<bf16> b = {bf16(2), bf16(-3), bf16(0.125f)};
    const std::vector<int64_t> i64 = {-1, int64_t(1) << 40};
    const std::vector<int32_t> i32 = {-7};
    const std::vector<uint16_t> u16 = {65535};
    const std::vector<uint8_t> u8 = {1, 0, 255};
    const std::vector<TensorSpec> specs = {{"i64", {2}, "I64"}, {"f", {3}, "F32"},   {"bf", {3, 1}, "F32"}, {"i32", {1}, "I32"},
                                           {"fb", {3}, "BF16"}, {"u16", {1}, "U16"}, {"b", {3}, "BF16"},    {"u8", {3}, "U8"}};
    SafetensorsWriter writer(path, specs, {{"kind", "sft \"x\""}});
    const auto write = [&](const char *name, const auto &values) { writer.write(name, values.data(), memory); };
    write("i64", i64), write("f", f), write("bf", b), write("i32", i32);
    EXPECT_FALSE(fs::exists(path));
    write("fb", f), write("u16", u16), write("b", b), write("u8", u8);
    writer.finish();
    EXPECT_FALSE(fs::exists(path + ".tmp"));

    const std::string bytes = get();
    uint64_t header_bytes;
    memcpy(&header_bytes, bytes.data(), 8);
    EXPECT_EQ(header_bytes % 8, 0u);
    EXPECT_EQ(bytes.substr(8 + header_bytes), bytes_of(i64) + bytes_of(f) + bytes_of<float>({2, -3, 0.125f}) + bytes_of(i32) +
                                                  bytes_of<uint16_t>({0x3fc0, 0x3f80, 0x8000}) + bytes_of(u16) + bytes_of(b) +
                                                  bytes_of(u8));
    const SafetensorsFile file(path);
    EXPECT_EQ(file.metadata().at("kind"), "sft \"x\"");
    EXPECT_EQ(file.array<int64_t>("i64"), i64);
    EXPECT_EQ(file.array<float>("bf")[2], 0.125f);
    expect_error([&] { file.array<float>("i64"); }, {path, "\"i64\" is I64, but F32 is needed"});
}

TEST_F(Safetensors, ArraysMayBeUnaligned) {
    put(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"I64","shape":[2],"data_offsets":[1,17]}})",
        "x" + bytes_of<int64_t>({-5, 7}));
    EXPECT_EQ(SafetensorsFile(path).array<int64_t>("b"), (std::vector<int64_t>{-5, 7}));
    EXPECT_EQ(SafetensorsFile(path).array_part<int64_t>("b", 1, 1), std::vector<int64_t>{7});
    expect_error([&] { SafetensorsFile(path).array_part<int64_t>("b", 1, 2); }, {path, "has 2 elements, not 2 from 1 on"});
}

TEST_F(Safetensors, MalformedFiles) {
    const auto refused = [&](const std::string &words) { expect_error([&] { SafetensorsFile file(path); }, {path, words}); };
    const auto header = [&](const std::string &text, size_t data, const std::string &words) {
        put(text, std::string(data, 0));
        refused(words);
    };
    expect_error([&] { SafetensorsFile file(path); }, {path, "No such file"});
    expect_error([&] { SafetensorsFile file(dir); }, {dir, "not a regular file"});
    put(""), refused("not a safetensors file");
    put("1234567"), refused("not a safetensors file");
    put("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"), refused("is a pointer of Git LFS");
    put(100, "{}", ""), refused("header claims 100 bytes but the file has 10");
    put(~uint64_t(0), "{}", ""), refused("not a safetensors file");
    put(100'000'001, "{}", ""), refused("more than 100000000");
    header("", 0, "not valid JSON");
    header("{\"a\":", 0, "not valid JSON: parse error at line 1, column 6");
    header("\xff\xfe{}", 0, "not valid JSON");
    header("[]", 0, "not a JSON object");
    header("7", 0, "not a JSON object");
    header(std::string(5000, '['), 0, "nested");
    header("{}", 3, "3 bytes follow");
    header(R"({"a":7})", 0, "not an object");
    // fields of tensor "a" in a file with 4 bytes of data
    const std::pair<const char *, const char *> tensors[] = {
        {R"("shape":[1],"data_offsets":[0,4])", "dtype is missing"},
        {R"("dtype":3,"shape":[1],"data_offsets":[0,4])", "dtype is missing or not a string"},
        {R"("dtype":"F33","shape":[1],"data_offsets":[0,4])", "F33"},
        {R"("dtype":"F32","data_offsets":[0,4])", "shape is missing"},
        {R"("dtype":"F32","shape":4,"data_offsets":[0,4])", "shape is missing or not"},
        {R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])", "not a list of sizes"},
        {R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])", "not a list of sizes"},
        {R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])", "not a list of sizes"},
        {R"("dtype":"F32","shape":[1])", "data_offsets"},
        {R"("dtype":"F32","shape":[1],"data_offsets":[0])", "data_offsets"},
        {R"("dtype":"F32","shape":[1],"data_offsets":[0,99999999999999999999])", "data_offsets"},
        {R"("dtype":"F32","shape":[1],"data_offsets":[-4,0])", "data_offsets"},
        {R"("dtype":"F32","shape":[2],"data_offsets":[0,4])", "(2) is 8 bytes but data_offsets span 4"},
        {R"("dtype":"F32","shape":[1],"data_offsets":[4,0])", "outside the file's data"},
        {R"("dtype":"F32","shape":[2],"data_offsets":[0,8])", "outside the file's data of 4 bytes"},
    };
    for (const auto &[fields, words] : tensors) header(std::string(R"({"a":{)") + fields + "}}", 4, words);
    header(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0, "more bytes than a file can hold");
    header(R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0, "more bytes than a file can hold");
    const std::string first = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)";
    header(first + R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4, "overlaps");
    header(first + R"("b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})", 6, "overlaps");
    header(first + R"("b":{"dtype":"F32","shape":[1],"data_offsets":[6,10]}})", 10, "hole of 2 bytes");
    header(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2,
           "\"a\" appears twice");
    header(R"({"__metadata__":[]})", 0, "__metadata__ is not an object");
    header(R"({"__metadata__":{"step":3}})", 0, "\"step\" is not a string");
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
    put(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", std::string(8, 1));
    const std::string whole = get();
    for (size_t n = 0; n < whole.size(); n++) {
        put(whole.substr(0, n));
        EXPECT_THROW(SafetensorsFile file(path), Error) << n;
    }
}

TEST_F(Safetensors, AbandonedFileIsRemoved) {
    expect_error([&] { SafetensorsWriter w(dir + "/none/a.safetensors", {{"a", {2}, "F32"}}); }, {dir + "/none", "No such file"});
    const float x[2] = {1, 2};
    const auto write_half = [&] {
        SafetensorsWriter writer(path, {{"a", {2}, "F32"}});
        writer.write_part("a", x, 1, memory);
        writer.finish();
    };
    expect_error(write_half, {path, "\"a\" was declared but not written"});
    EXPECT_TRUE(fs::is_empty(dir));
}

TEST_F(Safetensors, FullDiskLeavesTheEarlierFile) {
    put("before");
    rlimit before, small{4096, 0};
    getrlimit(RLIMIT_FSIZE, &before);
    small.rlim_max = before.rlim_max;
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    const std::vector<float> x(4096);
    const auto write = [&] {
        SafetensorsWriter writer(path, {{"x", {4096}, "F32"}});
        setrlimit(RLIMIT_FSIZE, &small);
        writer.write("x", x.data(), memory);
    };
    expect_error(write, {path, "cannot write: File too large"});
    setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
    EXPECT_FALSE(fs::exists(path + ".tmp"));
    EXPECT_EQ(get(), "before");
}

TEST_F(Safetensors, ErrorsOfJsonNameTheirPlace) {
    put("{\n  \"a\": 1,\n  \"b\": ]\n}");
    expect_error([&] { read_json(path); }, {path, "line 3, column 8"});
    expect_error([&] { read_json(path, 10); }, {path, "more than the 10"});
    put(R"({"a": {"x": 1, "x": 2}})");
    expect_error([&] { read_json(path); }, {path, "\"x\" appears twice"});
    put(R"([{"x": 1}, {"x": 2}])");  // in two objects
    EXPECT_EQ(read_json(path).size(), 2u);
    const auto value = nlohmann::json::parse(R"({"n": 3, "bad": [1, "2"], "in": {"n": "x"}})");
    const Fields fields(value, "f.json");
    expect_error([&] { fields.text("n"); }, {"f.json", "n is 3"});
    expect_error([&] { fields.ids("bad"); }, {"f.json", "bad is [1,\"2\"]"});
    expect_error([&] { fields.object("in").count("n"); }, {"f.json", "in.n is \"x\""});
}
