// Files that are read at an offset, or written such that a crash never leaves a partial file under the final name. Every failure ends in die()
// with the path and the system's reason.
#pragma once
#include <chrono>
#include <cstddef>
#include <string>

// The end of a message about a failed write.
inline constexpr const char *other_place = "\n  fix: give a place with enough free space that you may write to";

class InputFile {
  public:
    explicit InputFile(const std::string &path);  // must be a regular file
    ~InputFile();
    InputFile(const InputFile &) = delete;

    void read(void *dst, size_t bytes, size_t offset) const;  // reads all bytes or dies; thread-safe
    const std::string &path() const { return path_; }
    size_t size() const { return size_; }

  private:
    std::string path_;
    int fd_;
    size_t size_;
};

// A file that is written as PATH.tmp or, if that exists, as PATH.1.tmp and so on. commit() syncs the file, renames it to PATH and syncs the
// directory. Without commit() the destructor removes it. If PATH is a symbolic link, its target is written. A device or a pipe is written directly.
class OutputFile {
  public:
    explicit OutputFile(const std::string &path);
    ~OutputFile();
    OutputFile(const OutputFile &) = delete;

    void write(const void *data, size_t bytes);
    void commit();
    const std::string &path() const { return path_; }

  private:
    [[noreturn]] void fail(const char *action) const;

    std::string path_, temporary_;
    int fd_;
};

// An exclusive lock of a directory: during its lifetime, no other process on this machine can lock the directory. The system releases the lock at any
// end of the process. On file systems without locks this class does nothing.
class DirectoryLock {
  public:
    explicit DirectoryLock(const std::string &dir);  // dies if the directory stays locked
    ~DirectoryLock();
    DirectoryLock(const DirectoryLock &) = delete;

  private:
    // A killed run keeps its lock until the system has reclaimed its memory.
    static constexpr std::chrono::seconds patience{5};

    int fd_;
};

void write_file(const std::string &path, const std::string &text);
void copy_file(const std::string &from, const std::string &to);
void sync_directory(const std::string &dir);  // makes renames and removals in the directory durable

std::string program_file(const std::string &path);  // a file of the project, relative to the executable
std::string cache_file(const std::string &name);    // the path of a file in the user's cache; creates the directory
bool cache_is_writable();

// Returns a file's size and a hash of its bytes. All threads together read the file once.
std::string fingerprint(const InputFile &file);
