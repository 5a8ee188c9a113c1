// The store of offloaded arrays in a file.
#include <algorithm>
#include <functional>

#include "../llmc/core/common.h"
#include "../llmc/core/rng.h"
#include "../llmc/core/store.h"
#include "errors.h"

namespace fs = std::filesystem;

namespace {

constexpr double patience = 60;

struct StoreTest : TemporaryDirectory {
    size_t files() const { return size_t(std::distance(fs::directory_iterator(dir), fs::directory_iterator())); }

    std::string open_file() const {  // a path to the store's file, which has no name
        for (const auto &entry : fs::directory_iterator("/proc/self/fd")) {
            std::error_code gone;
            if (fs::read_symlink(entry.path(), gone).string().starts_with(dir)) return entry.path();
        }
        return "";
    }
};

struct Array {  // aligned as in an arena
    size_t bytes;
    std::unique_ptr<std::byte[], decltype(&free)> data;
    explicit Array(size_t bytes) : bytes(bytes), data(static_cast<std::byte *>(aligned_alloc(store_alignment, bytes)), &free) {
        fill(0);
    }
    void fill(uint32_t seed) {
        const Random random{seed, Purpose::test, 0};
        for (size_t i = 0; i < bytes; i += 64) data[i] = std::byte(random.below(i, 256));
    }
    bool operator==(const Array &o) const { return std::equal(data.get(), data.get() + bytes, o.data.get()); }
};

}  // namespace

// Arrays of sizes around that of a block, offloaded and prefetched in random order.
TEST_F(StoreTest, PrefetchedArraysEqualOffloadedOnes) {
    const size_t block = size_t(8) << 20,
                 sizes[] = {store_alignment, block - store_alignment, block, block + store_alignment, 2 * block};
    std::vector<size_t> places;
    size_t bytes = 0;
    for (size_t size : sizes) places.push_back(bytes), bytes += size;
    const auto store = make_disk_store(dir, bytes, patience);
    EXPECT_EQ(files(), 0) << "a file with a name would remain after a crash";
    EXPECT_EQ(fs::file_size(open_file()), bytes);  // reserved
    const Random random{7, Purpose::test, 0};
    for (uint32_t round = 0; round < 12; round++) {
        const size_t i = random.below(round, std::size(sizes));
        Array out(sizes[i]), in(sizes[i]);
        out.fill(round);
        store->offload(places[i], out.data.get(), out.bytes);
        if (random.below(100 + round, 2)) store->wait(places[i]), Array(out.bytes).fill(1);
        store->prefetch(places[i], in.data.get(), in.bytes);
        store->wait(places[i]);
        EXPECT_TRUE(in == out) << sizes[i];
    }
    store->wait(bytes + 1);  // an unused place
}

TEST_F(StoreTest, DamageAndTruncationAreFound) {
    const auto expect_found = [&](const std::function<void()> &damage, const std::vector<std::string> &parts) {
        const auto store = make_disk_store(dir, size_t(16) << 20, patience);
        Array out(size_t(12) << 20), in(out.bytes);
        store->offload(0, out.data.get(), out.bytes), store->wait(0);
        damage();
        store->prefetch(0, in.data.get(), in.bytes);
        expect_error([&] { store->wait(0); }, parts);
    };
    expect_found(
        [&] {
            std::fstream(open_file(), std::ios::in | std::ios::out | std::ios::binary).seekp((size_t(9) << 20) + 17).put('x');
        },
        {dir + ": an offloaded array reads back other bytes than were written, in the block at byte 8388608",
         "fix: put --offload_dir on another disk"});
    expect_found([&] { fs::resize_file(open_file(), size_t(4) << 20); },
                 {dir + ": cannot read the offloaded arrays: the file was cut off"});
}

TEST_F(StoreTest, UnusableDirectoriesAreRefused) {
    expect_error([&] { make_disk_store(dir + "/none", 4096, patience); },
                 {dir + "/none: cannot create a file for --offload: No such file or directory", "fix: give --offload_dir"});
    put("file", "text");
    expect_error([&] { make_disk_store(dir + "/file", 4096, patience); }, {"cannot create a file", "Not a directory"});
    expect_error([&] { make_disk_store(dir, size_t(1) << 50, patience); },
                 {dir + ": there is no room for the 1048576.00 GiB that --offload needs", "are free",
                  "fix: put --offload_dir on a larger disk"});
}
