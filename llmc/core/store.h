// Where arrays lie while no op needs them (--offload): outside of the arena, in a file if the ops run on a CPU, in pinned memory of the host if
// they run on a GPU. Copies run beside the ops. The plan gives each array its place here (Plan::add_place), and each array of the arena from which one
// leaves, or into which one comes, a lifetime that ends or begins with the copy.
#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include "device.h"

// Places in a store, and arrays that leave or come, begin at multiples of so many bytes, and a copy moves a multiple of them: direct I/O asks for it.
constexpr size_t store_alignment = 4096;

class Store {
  public:
    virtual ~Store() = default;

    virtual std::string name() const = 0;  // for people: "a file in /scratch"
    // Begins to copy an array to its place, as the ops before this call have left it. Until wait() nothing may write to the array.
    virtual void leave(size_t place, const void *from, size_t bytes) = 0;
    // Begins to copy the same bytes back, into memory that the ops before this call have used. Until wait() nothing may use the array.
    virtual void come(size_t place, void *to, size_t bytes) = 0;
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
