#include "store.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "common.h"
#include "hash.h"
#include "memory.h"

namespace {

constexpr size_t block_bytes = size_t(8) << 20;  // bytes per read or write, and per checksum
constexpr const char *fix_disk = "\n  fix: give --offload_dir a directory on a local disk that you may write to";

// The file, and the work queue of its thread. Both are shared with the thread, which may hang in a system call beyond the lifetime of the store.
struct DiskFile {
    const std::string dir;
    const size_t bytes;
    int fd = -1;
    bool direct = true;
    std::map<size_t, std::vector<uint64_t>> checksums = {};  // for the blocks of each place; only the thread uses it

    std::mutex lock = {};  // guards all members below
    std::condition_variable changed = {};
    std::deque<std::function<void()>> work = {};
    size_t done = 0, progress = 0;  // number of finished pieces of work, and of system calls
    std::string error = "";         // of the first piece of work that failed; later ones are skipped
    bool ends = false;

    ~DiskFile() {
        if (fd >= 0) close(fd);
    }

    int open_in_directory(int flags) const {
        int file = open(dir.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
        if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return file;
        std::string path = dir + "/offload.XXXXXX";  // this file system does not support unnamed files
        file = mkostemp(path.data(), O_CLOEXEC | flags);
        if (file >= 0) unlink(path.c_str());
        return file;
    }

    void open_file() {
        fd = open_in_directory(O_DIRECT);
        if (fd < 0 && errno == EINVAL) direct = false, fd = open_in_directory(0);
        if (fd < 0) die("%s: cannot create a file for --offload: %s%s", dir.c_str(), strerror(errno), fix_disk);
        if (const int failed = posix_fallocate(fd, 0, off_t(bytes))) {
            struct statvfs info;
            const size_t free = statvfs(dir.c_str(), &info) == 0 ? size_t(info.f_bavail) * info.f_frsize : 0;
            die("%s: there is no room for the %s that --offload needs: %s (%s are free)\n  fix: put --offload_dir on a larger disk, or offload "
                "less; see --plan",
                dir.c_str(), human_bytes(bytes).c_str(), strerror(failed), human_bytes(free).c_str());
        }
        alignas(store_alignment) static constexpr std::byte zeros[store_alignment] = {};
        if (pwrite(fd, zeros, store_alignment, 0) < 0 && errno == EINVAL)  // larger sectors
            direct = false, fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_DIRECT);
    }

    // Reads or writes a whole block.
    template <class Call, class Byte> void transfer(const char *what, Call call, Byte *data, size_t n, size_t at) {
        while (n > 0) {
            const ssize_t moved = call(fd, data, n, off_t(at));
            if (moved < 0 && errno == EINTR) continue;
            if (moved <= 0)
                die("%s: cannot %s the offloaded arrays: %s%s", dir.c_str(), what,
                    moved < 0 ? strerror(errno) : "the file was cut off", fix_disk);
            data += moved, n -= size_t(moved), at += size_t(moved);
            const std::lock_guard guard(lock);
            progress++, changed.notify_all();
        }
    }

    void write(size_t place, const std::byte *from, size_t n) {
        std::vector<uint64_t> &sums = checksums[place];
        sums.clear();
        in_parts(
            n,
            [&](size_t first, size_t part) {
                sums.push_back(hash_number(from + first, part));
                transfer("write", pwrite, from + first, part, place + first);
            },
            block_bytes);
    }

    void read(size_t place, std::byte *to, size_t n) {
        const std::vector<uint64_t> &sums = checksums[place];
        in_parts(
            n,
            [&](size_t first, size_t part) {
                transfer("read", pread, to + first, part, place + first);
                if (hash_number(to + first, part) != sums.at(first / block_bytes))
                    die("%s: an offloaded array reads back other bytes than were written, in the block at byte %zu of the file\n  fix: "
                        "put --offload_dir on another disk; --resume auto continues from the last checkpoint",
                        dir.c_str(), place + first);
            },
            block_bytes);
    }

    void run() {  // the thread
        std::unique_lock guard(lock);
        for (;;) {
            changed.wait(guard, [&] { return ends || !work.empty(); });
            if (work.empty()) return;
            const auto next = std::move(work.front());
            work.pop_front();
            if (error.empty()) {
                guard.unlock();
                std::string failed;
                try {
                    next();
                } catch (const std::exception &e) {
                    failed = message_of(e);
                }
                guard.lock();
                error = failed;
            }
            done++, changed.notify_all();
        }
    }
};

class DiskStore final : public Store {
  public:
    DiskStore(const std::string &dir, size_t bytes, double patience)
        : file_(new DiskFile{dir, bytes}), patience_(patience), thread_([file = file_] { file->run(); }) {
        try {
            wait_for(submit([&file = *file_] { file.open_file(); }));
        } catch (...) {
            end_thread();
            throw;
        }
    }
    ~DiskStore() override { end_thread(); }
    DiskStore(const DiskStore &) = delete;
    DiskStore &operator=(const DiskStore &) = delete;

    std::string name() const override {
        return format("a file in %s%s", file_->dir.c_str(),
                      file_->direct ? "" : ", through the page cache (its file system has no direct I/O)");
    }
    void offload(size_t place, const void *from, size_t bytes) override {
        last_[place] = submit([=, &file = *file_] { file.write(place, static_cast<const std::byte *>(from), bytes); });
    }
    void prefetch(size_t place, void *to, size_t bytes) override {
        last_[place] = submit([=, &file = *file_] { file.read(place, static_cast<std::byte *>(to), bytes); });
    }
    void wait(size_t place) override {
        if (const auto copy = last_.find(place); copy != last_.end()) wait_for(copy->second);
    }

  private:
    // Returns the value of `done` at which this piece of work has ended.
    size_t submit(std::function<void()> work) {
        const std::lock_guard guard(file_->lock);
        file_->work.push_back(std::move(work));
        file_->changed.notify_all();
        return ++submitted_;
    }

    void wait_for(size_t number) {
        DiskFile &f = *file_;
        std::unique_lock guard(f.lock);
        while (f.done < number) {
            const size_t before = f.done + f.progress;
            if (!f.changed.wait_for(guard, std::chrono::duration<double>(patience_),
                                    [&] { return f.done + f.progress > before; })) {
                hangs_ = true;
                die("%s: the directory of --offload has not answered for %g seconds\n  fix: put --offload_dir on a local disk, or raise "
                    "--comm_timeout",
                    f.dir.c_str(), patience_);
            }
        }
        if (!f.error.empty()) throw Error(f.error);
    }

    // A hanging thread is abandoned until the process ends. Arrays may be freed afterwards, so all other copies end first.
    void end_thread() {
        {
            const std::lock_guard guard(file_->lock);
            file_->ends = true;
            file_->changed.notify_all();
        }
        hangs_ ? thread_.detach() : thread_.join();
    }

    const std::shared_ptr<DiskFile> file_;
    const double patience_;
    size_t submitted_ = 0;
    bool hangs_ = false;
    std::map<size_t, size_t> last_;  // the number of the last copy of each place
    std::thread thread_;
};

}  // namespace

std::unique_ptr<Store> make_disk_store(const std::string &dir, size_t bytes, double patience) {
    return std::make_unique<DiskStore>(dir, bytes, patience);
}
