// A CUDA runtime without a GPU: a program that nvcc compiled with `-gencode arch=compute_90,code=compute_90 --no-compress` carries its PTX,
// and linked with runtime.cpp in place of libcudart its launches are interpreted. Device memory is the host's; a launch has ended when it
// returns; errors of a kernel are thrown by its launch.
#pragma once
#include <functional>
#include <utility>

#include "interpreter.h"

namespace ptx {

// All launches of a kernel so far that had the same grid, threads and shared memory.
struct Launches {
    std::string mangled, name;
    Launch launch;  // its shared memory with the kernel's static variables
    int carveout =
        0;  // share of an SM's memory that the kernel prefers as shared memory, in percent; negative: the driver's choice
    uint64_t launches = 0, barriers = 0, divergent_branches = 0;
    std::array<Count, pipes> by_pipe;
    double seconds = 0;
    std::vector<BlockWork> blocks;  // sums over all launches, of each block that was run; if memory was counted
    Traffic traffic;

    Count total() const;
};
std::vector<Launches> launched();
void forget_launches();
std::vector<std::string> program_kernels();  // mangled: of all that is linked
extern bool counting;                        // also counts memory; initially set by PTX_COUNT in the environment
extern size_t sample;                        // Launch::sample of the launches from now on
extern bool last_first, sums_in_order;       // of the launches from now on, as in Launch
extern int compute_capability;               // as the runtime reports it: 90, or OtherGpu's

// A product asked of cuBLASLt. The library's rules are checked at every product; a violation ends the call with the rule.
struct Product {
    size_t m, n, k, a_ld, b_ld, d_ld;
    size_t in_bytes, out_bytes;  // of an element
    size_t alignment;            // of pointers, as the wrapper has told it
    const void *a, *b, *d, *workspace;
    int algorithm;  // its number among the candidates
};
extern std::vector<Product> products;  // in order; a test clears it
extern int heuristics;                 // how often cuBLASLt was asked for an algorithm
extern int heuristic_state;            // the heuristic's answer: a cublasStatus_t
extern int candidates,
    fastest;  // the number of algorithms, and the number of the one that takes 0 s by the clock of events; the others take 1 s
extern double seconds;  // that products have taken so

// Whether device memory [p, p + bytes) is allocated.
bool allocated(const void *p, size_t bytes);

// While it lives, the program's PTX is what `edit` makes of it; it says whether it changed a module.
class EditedPtx {
  public:
    explicit EditedPtx(const std::function<bool(std::string &text)> &edit);
    ~EditedPtx();
    EditedPtx(const EditedPtx &) = delete;
    EditedPtx &operator=(const EditedPtx &) = delete;
    size_t edited = 0;  // modules
};

// While it lives, a setting has this value.
template <auto &setting> class While {
  public:
    using Value = std::remove_reference_t<decltype(setting)>;
    explicit While(Value value) : before_(std::exchange(setting, value)) {}
    ~While() { setting = before_; }
    While(const While &) = delete;
    While &operator=(const While &) = delete;

  private:
    const Value before_;
};
using OtherGpu = While<compute_capability>;  // programs that choose kernels by the GPU's compute capability see this one
}  // namespace ptx
