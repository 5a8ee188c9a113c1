// The store of offloaded arrays (--offload) while no op needs them: a file if the ops run on a CPU, pinned host memory if they run on a GPU.
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

    virtual std::string name() const = 0;  // for people: "a file in /scratch"
    // Begins to copy an array to its place, as the ops before this call have left it. Until wait() nothing may write to the array.
    virtual void offload(size_t place, const void *from, size_t bytes) = 0;
    // Begins to copy the same bytes back, into memory that the ops before this call have used. Until wait() nothing may use the array.
    virtual void prefetch(size_t place, void *to, size_t bytes) = 0;
    // The ops after this call run when the last copy from or to the place has ended.
    virtual void wait(size_t place) = 0;
};

// A file without a name in `dir`: whatever ends the process, nothing is left of it. The constructor reserves all its bytes, and dies if there is no
// room for them, or if the directory does not answer within `patience` seconds, as wait() does when a copy takes that long. Copies go around the
// system's page cache (O_DIRECT) where the file system can do that. A checksum of all that has left is kept in memory, and wait() dies if
// other bytes come back.
std::unique_ptr<Store> make_disk_store(const std::string &dir, size_t bytes, double patience);

// Makes the store of a device's arrays; `dir` is --offload_dir.
template <class X> std::unique_ptr<Store> make_store(Cpu<X>, const std::string &dir, size_t bytes, double patience) {
    return make_disk_store(dir, bytes, patience);
}
