// The store of offloaded arrays (--offload) between uses: a file if the ops run on a CPU, pinned host memory if they run on a GPU.
// Copies overlap with the ops. The plan assigns each offloaded array a place in the store (Plan::add_place); the lifetime of its buffer in the
// arena ends with the copy out, or begins with the copy back.
#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include "device.h"

// Alignment in bytes of offloaded arrays, of their offsets in a store, and of the size of copies, as required by direct I/O.
constexpr size_t store_alignment = 4096;

class Store {
  public:
    virtual ~Store() = default;

    virtual std::string name() const = 0;  // for messages: "a file in /scratch"
    // Starts to copy an array to its place, with the results of all ops before this call. Until wait() the array must not be written.
    virtual void offload(size_t place, const void *from, size_t bytes) = 0;
    // Starts to copy the bytes back, into memory that ops before this call have used. Until wait() the array must not be used.
    virtual void prefetch(size_t place, void *to, size_t bytes) = 0;
    // Ops after this call run when the last copy from or to the place has ended.
    virtual void wait(size_t place) = 0;
};

// An unnamed file in `dir`: nothing is left of it after any end of the process. The constructor reserves all its bytes, and dies if there is no room,
// or if the directory does not respond within `patience` seconds; wait() dies if a copy takes that long. Copies bypass the system's page cache
// (O_DIRECT) if the file system supports that. A checksum of the written data stays in memory, and wait() dies if other bytes come back.
std::unique_ptr<Store> make_disk_store(const std::string &dir, size_t bytes, double patience);

// Creates the store of a device's arrays; `dir` is --offload_dir.
template <class X> std::unique_ptr<Store> make_store(Cpu<X>, const std::string &dir, size_t bytes, double patience) {
    return make_disk_store(dir, bytes, patience);
}
