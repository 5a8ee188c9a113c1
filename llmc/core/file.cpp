#include "file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <thread>
#include <vector>

#include "common.h"
#include "hash.h"

// The few lines that Git leaves in place of a large file whose content it has not fetched begin with this.
static constexpr char lfs_pointer[] = "version https://git-lfs.";

InputFile::InputFile(const std::string &path)
    : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {  // O_NONBLOCK: opening a pipe must not block
    if (fd_ < 0) die("%s: cannot open: %s\n  fix: give the path of a file that you may read", path.c_str(), strerror(errno));
    struct stat info;
    if (fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd_);
        die("%s: not a regular file\n  fix: give the path of a file that you may read", path.c_str());
    }
    size_ = size_t(info.st_size);
    char head[sizeof lfs_pointer - 1];
    if (pread(fd_, head, sizeof head, 0) == ssize_t(sizeof head) && std::equal(head, std::end(head), lfs_pointer)) {
        close(fd_);
        die("%s: is a pointer of Git LFS, not the file itself\n  fix: git lfs pull in its repository, or download the file",
            path.c_str());
    }
}

InputFile::~InputFile() { close(fd_); }

void InputFile::read(void *dst, size_t bytes, size_t offset) const {
    for (char *to = static_cast<char *>(dst); bytes > 0;) {
        const ssize_t got = pread(fd_, to, bytes, off_t(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            die("%s: cannot read: %s\n  fix: see that its disk is there and can be read", path_.c_str(), strerror(errno));
        if (got == 0)
            die("%s: ends at byte %zu, %zu more were expected\n  fix: copy the whole file again; this one was cut off",
                path_.c_str(), offset, bytes);
        to += got, bytes -= size_t(got), offset += size_t(got);
    }
}

// Returns the target of a chain of symbolic links, which may not exist yet.
static std::filesystem::path target_of(std::filesystem::path path) {
    std::error_code error;
    for (int i = 0; i < 40 && std::filesystem::is_symlink(path, error); i++)
        path = path.parent_path() / std::filesystem::read_symlink(path, error);
    return path;
}

OutputFile::OutputFile(const std::string &path) : path_(path) {
    std::error_code error;
    const auto kind = std::filesystem::status(path, error).type();
    if (kind == std::filesystem::file_type::directory)
        die("%s: is a directory\n  fix: give the path of a file; it may be new", path.c_str());
    const bool device = path.starts_with("/dev/") && !path.starts_with("/dev/shm/");  // /dev/stdout may be a regular file
    const bool stream = device || (std::filesystem::exists(path, error) && kind != std::filesystem::file_type::regular);
    if (!stream) path_ = target_of(path);
    temporary_ = stream ? path_ : path_ + ".tmp";
    const int flags = O_WRONLY | O_CLOEXEC | (stream ? O_APPEND : O_CREAT | O_EXCL);
    for (int i = 1; (fd_ = open(temporary_.c_str(), flags, 0666)) < 0 && errno == EEXIST; i++)
        temporary_ = format("%s.%d.tmp", path_.c_str(), i);
    if (fd_ < 0) fail("create");
}

OutputFile::~OutputFile() {
    if (fd_ < 0) return;
    close(fd_);
    if (temporary_ != path_) unlink(temporary_.c_str());
}

void OutputFile::fail(const char *action) const {
    die("%s: cannot %s: %s%s", temporary_.c_str(), action, strerror(errno), other_place);
}

void OutputFile::write(const void *data, size_t bytes) {
    for (const char *from = static_cast<const char *>(data); bytes > 0;) {
        const ssize_t put = ::write(fd_, from, bytes);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) fail("write");
        from += put, bytes -= size_t(put);
    }
}

void OutputFile::commit() {
    const bool stream = temporary_ == path_;
    if (fsync(fd_) != 0 && !(stream && errno == EINVAL)) fail("sync");
    if (!stream && rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
    close(fd_);
    fd_ = -1;
    if (stream) return;
    const auto parent = std::filesystem::path(path_).parent_path();
    sync_directory(parent.empty() ? "." : parent.string());
}

void write_file(const std::string &path, const std::string &text) {
    OutputFile file(path);
    file.write(text.data(), text.size());
    file.commit();
}

void copy_file(const std::string &from, const std::string &to) {
    const InputFile in(from);
    OutputFile out(to);
    std::vector<char> buffer(std::min(in.size(), size_t(1) << 20));
    for (size_t at = 0; at < in.size(); at += buffer.size()) {
        const size_t bytes = std::min(buffer.size(), in.size() - at);
        in.read(buffer.data(), bytes, at);
        out.write(buffer.data(), bytes);
    }
    out.commit();
}

void sync_directory(const std::string &dir) {
    const int fd = open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) die("%s: cannot open: %s%s", dir.c_str(), strerror(errno), other_place);
    const int error = fsync(fd) == 0 || errno == EINVAL ? 0 : errno;  // EINVAL: this file system cannot sync directories
    close(fd);
    if (error) die("%s: cannot sync: %s%s", dir.c_str(), strerror(error), other_place);
}

DirectoryLock::DirectoryLock(const std::string &dir) : fd_(open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    if (fd_ < 0) return;
    for (const auto since = std::chrono::steady_clock::now(); flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;) {
        if (std::chrono::steady_clock::now() - since > patience) {
            close(fd_);
            die("%s: another run is writing there\n  fix: wait until it ends, or give another --output_dir", dir.c_str());
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
}

DirectoryLock::~DirectoryLock() {
    if (fd_ >= 0) close(fd_);
}

std::string program_file(const std::string &path) {
    return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / path).string();
}

// Without a home directory the cache is in /tmp, where other users can write; files of other owners are not read.
static std::string cache_directory() {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && *cache) return std::string(cache) + "/train_llama";
    if (home && *home) return std::string(home) + "/.cache/train_llama";
    const std::string dir = format("/tmp/train_llama-%u", unsigned(getuid()));
    struct stat info;
    mkdir(dir.c_str(), 0700);
    if (lstat(dir.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != getuid() || info.st_mode & 0077)
        die("there is no HOME for the cache, and %s is no directory of this user alone\n  fix: set HOME or XDG_CACHE_HOME",
            dir.c_str());
    return dir;
}

bool cache_is_writable() {
    std::error_code error;
    std::filesystem::create_directories(cache_directory(), error);
    return !error && access(cache_directory().c_str(), W_OK | X_OK) == 0;
}

std::string cache_file(const std::string &name) {
    const std::string dir = cache_directory();
    std::error_code error;
    std::filesystem::create_directories(dir, error);
    if (error) die("cannot create the cache %s: %s\n  fix: set XDG_CACHE_HOME", dir.c_str(), error.message().c_str());
    return dir + "/" + name;
}

std::string fingerprint(const InputFile &file) {
    constexpr size_t part = size_t(4) << 20;
    const size_t parts = (file.size() + part - 1) / part;
    std::vector<uint64_t> hashes(parts);
    std::exception_ptr error;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < parts; i++) {
        try {
            std::vector<char> bytes(std::min(part, file.size() - i * part));
            file.read(bytes.data(), bytes.size(), i * part);
            hashes[i] = hash_number(bytes.data(), bytes.size());
        } catch (const Error &) {  // no exception may leave a parallel loop
#pragma omp critical
            error = std::current_exception();
        }
    }
    if (error) std::rethrow_exception(error);
    return format("%zu-%s", file.size(), hash_of(hashes.data(), parts * sizeof(uint64_t)).c_str());
}
