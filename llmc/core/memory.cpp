#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "common.h"

std::string human_bytes(size_t bytes) {
    if (bytes >= size_t(1) << 30) return format("%.2f GiB", double(bytes) / double(1 << 30));
    if (bytes >= size_t(1) << 20) return format("%.1f MiB", double(bytes) / double(1 << 20));
    return format("%.1f KiB", double(bytes) / 1024);
}

static size_t kib_line(const char *file, const char *name) {
    std::ifstream lines(file);
    std::string word;
    size_t kib = 0;
    while (lines >> word)
        if (word == name) lines >> kib;
    return kib * 1024;
}

size_t HostMemory::available() const { return kib_line("/proc/meminfo", "MemAvailable:"); }

// Returns the largest value seen so far. The kernel sums per-CPU counters, and may report a few pages less a moment later.
size_t HostMemory::peak() const {
    static std::atomic<size_t> largest = 0;
    const size_t now = kib_line("/proc/self/status", "VmHWM:");
    size_t before = largest;
    while (before < now && !largest.compare_exchange_weak(before, now)) {}
    return std::max(before, now);
}

static constexpr size_t library_bytes = size_t(10) << 20;  // measured with oneDNN 2.6.3: 8 to 12 MiB after the first step
size_t HostMemory::process() const { return kib_line("/proc/self/status", "VmRSS:") + library_bytes; }

std::byte *HostMemory::allocate(size_t bytes) {
    void *base = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        die("cannot allocate %s: %s\n  fix: see --plan; a smaller --row_tokens or --recompute layer needs less",
            human_bytes(bytes).c_str(), strerror(errno));
    madvise(base, bytes, MADV_HUGEPAGE);
    memset(base, 0, bytes);  // touches every page now, so a run that does not fit ends before its first step
    return static_cast<std::byte *>(base);
}

void HostMemory::release(std::byte *base, size_t bytes) { munmap(base, std::max<size_t>(bytes, 1)); }

void HostMemory::fill(void *to, uint8_t byte, size_t bytes) { memset(to, byte, bytes); }

void HostMemory::write(void *to, const void *host, size_t bytes) {
    if (bytes) memcpy(to, host, bytes);
}

void HostMemory::read(void *host, const void *from, size_t bytes) {
    if (bytes) memcpy(host, from, bytes);
}
