// A CUDA runtime without a GPU: a program that nvcc compiled with `-gencode arch=compute_90,code=compute_90 --no-compress` carries its PTX,
// and linked with runtime.cpp in place of libcudart its launches are interpreted. Device memory is the host's; a launch has ended when it
// returns; errors of a kernel are thrown by its launch.
#pragma once
#include <functional>

#include "interpreter.h"

namespace ptx {

// All launches of a kernel so far that had the same grid, threads and shared memory.
struct Launches {
    std::string mangled, name;
    Launch launch;
    uint64_t launches = 0, barriers = 0, divergent_branches = 0;
    std::array<Count, pipes> by_pipe;
    double seconds = 0;

    Count total() const;
};
std::vector<Launches> launched();
extern bool counting;  // of memory, too; at the start whether the environment has PTX_COUNT
void print_counts();   // of launched(): a line each

// While it lives, the program's PTX is what `edit` makes of it; it says whether it changed a module.
class EditedPtx {
  public:
    explicit EditedPtx(const std::function<bool(std::string &text)> &edit);
    ~EditedPtx();
    EditedPtx(const EditedPtx &) = delete;
    EditedPtx &operator=(const EditedPtx &) = delete;
    size_t edited = 0;  // modules
};
}  // namespace ptx
