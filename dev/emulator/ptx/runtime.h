// A CUDA runtime without a GPU. A program that nvcc compiled with `-gencode arch=compute_90,code=compute_90 --no-compress` contains its PTX. Linked
// with runtime.cpp instead of libcudart, its launches run in the interpreter. Device memory is host memory, a launch has ended when it returns, and
// it throws the errors of its kernel.
#pragma once
#include <functional>
#include <utility>

#include "interpreter.h"

namespace ptx {

// All launches so far of one kernel with the same grid, threads and shared memory.
struct Launches {
    std::string mangled, name;
    Launch launch;  // its shared memory includes the kernel's static variables
    int carveout =
        0;  // share of an SM's memory that the kernel prefers as shared memory, in percent; negative: the driver's choice
    uint64_t launches = 0, barriers = 0, divergent_branches = 0;
    std::array<Count, pipes> by_pipe;
    double seconds = 0;
    std::vector<BlockWork> blocks;  // per block that was run, summed over all launches; if memory was counted
    Traffic traffic;

    Count total() const;
};
std::vector<Launches> launched();
void forget_launches();
std::vector<std::string> program_kernels();  // mangled names of all linked kernels
extern bool counting;                        // also count memory; initially set by PTX_COUNT in the environment
extern size_t sample;                        // Launch::sample of the following launches
extern bool last_first, sums_in_order;       // members of Launch, for the following launches
extern int compute_capability;               // reported by the runtime: 90, or OtherGpu's

// A product computed by cuBLASLt. Every product is checked against the library's rules; a violation ends the call with an error that quotes the rule.
struct Product {
    size_t m, n, k, a_ld, b_ld, d_ld;
    size_t in_bytes, out_bytes;  // of an element
    size_t alignment;            // of the pointers, as the wrapper has declared it
    const void *a, *b, *d, *workspace;
    int algorithm;  // index among the candidates
};
extern std::vector<Product> products;  // in the order of calls; tests clear it
extern int heuristics;                 // number of calls of the heuristic
extern int heuristic_state;            // the heuristic's answer: a cublasStatus_t
extern int candidates,
    fastest;  // number of algorithms, and the index of the one that takes 0 s by the clock of events; the others take 1 s
extern double seconds;  // total time of products by that clock

// True if device memory [p, p + bytes) is allocated.
bool allocated(const void *p, size_t bytes);

// During its lifetime, `edit` has changed the program's PTX. `edit` returns true if it changed a module.
class EditedPtx {
  public:
    explicit EditedPtx(const std::function<bool(std::string &text)> &edit);
    ~EditedPtx();
    EditedPtx(const EditedPtx &) = delete;
    EditedPtx &operator=(const EditedPtx &) = delete;
    size_t edited = 0;  // number of changed modules
};

// Sets a variable to a value during its lifetime.
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
using OtherGpu = While<compute_capability>;  // for programs that choose kernels by compute capability
}  // namespace ptx
