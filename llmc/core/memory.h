// The host's interface to the memory of a device: it allocates the arena and copies data in and out (weights, the indices of a packed row,
// the state for a checkpoint). Calls are coarse, so a runtime interface costs nothing. Copies keep the order of the ops around them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "floats.h"

class Memory {
  public:
    virtual ~Memory() = default;

    virtual std::string device() const = 0;  // "cpu", "NVIDIA H100 80GB HBM3"
    virtual size_t available() const = 0;    // bytes that an allocation may still take
    // Bytes to keep free for libraries that are loaded later. communicators: connections to ranks on other devices (Ranks::communicators)
    virtual size_t reserve(size_t /*communicators*/) const { return 0; }
    virtual size_t process() const = 0;  // bytes of this process outside the arena, libraries that load later included
    virtual size_t peak() const = 0;     // the peak memory of the process so far, in bytes

    virtual void use_on_this_thread() {}            // a thread calls this before it uses memory that another thread has made
    virtual std::byte *allocate(size_t bytes) = 0;  // the memory is 0; dies if there is not enough
    virtual void release(std::byte *, size_t bytes) = 0;
    virtual void fill(void *to, uint8_t byte, size_t bytes) = 0;
    virtual void write(void *to, const void *host, size_t bytes) = 0;   // the caller may change `host` as soon as this returns
    virtual void read(void *host, const void *from, size_t bytes) = 0;  // `host` has the bytes when this returns
};

template <class T> void write(Memory &memory, T *to, const std::vector<T> &host) {
    memory.write(to, host.data(), host.size() * sizeof(T));
}
template <class T> std::vector<T> read(Memory &memory, const T *from, size_t n) {
    std::vector<T> host(n);
    memory.read(host.data(), from, n * sizeof(T));
    return host;
}

template <class X> void write(Memory &memory, Floats<X> to, const std::vector<float> &host) {
    std::vector<X> rounded(host.size());
    std::vector<int16_t> lower(to.lower ? host.size() : 0);
    for (size_t i = 0; i < host.size(); i++) Floats<X>{rounded.data(), lower.data()}.store(i, host[i]);
    write(memory, to.rounded, rounded), write(memory, to.lower, lower);
}
template <class X> std::vector<float> read(Memory &memory, Floats<X> from, size_t n) {
    auto rounded = read(memory, from.rounded, n);
    auto lower = read(memory, from.lower, from.lower ? n : 0);
    std::vector<float> host(n);
    for (size_t i = 0; i < n; i++) host[i] = Floats<X>{rounded.data(), lower.data()}.load(i);
    return host;
}

inline void write(Memory &memory, bf16 *to, const std::vector<float> &host) {
    write(memory, to, std::vector<bf16>(host.begin(), host.end()));
}
inline std::vector<float> read_floats(Memory &memory, const bf16 *from, size_t n) {
    const auto host = read(memory, from, n);
    return {host.begin(), host.end()};
}
template <class X> std::vector<float> read_floats(Memory &memory, Floats<X> from, size_t n) { return read(memory, from, n); }

// Calls f(first, n) for consecutive parts of an array, of at most `elements` each, so that only one part is on the host at a time.
template <class F> void in_parts(size_t count, F f, size_t elements = size_t(1) << 20) {
    for (size_t first = 0; first < count; first += elements) f(first, std::min(elements, count - first));
}

class HostMemory final : public Memory {
  public:
    std::string device() const override { return "cpu"; }
    size_t available() const override;  // MemAvailable
    size_t process() const override;    // now, code that oneDNN generates and thread stacks included
    size_t peak() const override;       // VmHWM

    std::byte *allocate(size_t bytes) override;
    void release(std::byte *, size_t bytes) override;
    void fill(void *to, uint8_t byte, size_t bytes) override;
    void write(void *to, const void *host, size_t bytes) override;
    void read(void *host, const void *from, size_t bytes) override;
};

std::string human_bytes(size_t);  // "3.91 GiB"

template <class X> std::unique_ptr<Memory> make_memory(Cpu<X>) { return std::make_unique<HostMemory>(); }
