// A PTX module and its decoded kernels. The operands of instructions are slots of a warp's register file.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../../../llmc/core/common.h"

namespace ptx {

constexpr int lanes = 32;
constexpr int slot_bytes = 4 * lanes;  // a register of 8 bytes has two slots; a predicate is a uint32_t, a bit per lane
constexpr int most_operands = 16;      // mma has 14

// Address windows of the block's shared memory (it never starts at 0, as on a GPU), the parameters, and the thread's local memory. They contain no
// host address. An address in shared memory has 24 bits; the bits above hold 1 + the rank of another block of the cluster (mapa).
constexpr uint64_t shared_window = uint64_t(1) << 60, param_window = uint64_t(1) << 61, local_window = uint64_t(1) << 62;
constexpr uint32_t shared_base = 1024, max_shared = 227 * 1024;  // per block, on any GPU
constexpr uint32_t max_static_shared = 48 * 1024;
constexpr uint32_t registers_of_multiprocessor = 65536;
uint32_t max_shared_of(int architecture);  // per block; architecture 90 is sm_90

struct Warp;
struct Instruction;
using Handler = void (*)(Warp &, const Instruction &);
using Mover = void (*)(void *slot, uint8_t *const *at,
                       uint32_t mask);  // moves values between a register and memory, lane by lane

enum class Control : uint8_t { none, branch, leave, barrier, arrival };
enum class Reduction : uint8_t { none, popc, all, any };  // reduction of a predicate at a barrier

// The pipeline of an instruction, in the groups of Nsight Compute.
enum class Pipe : uint8_t { control, integer, fp32, fp64, special, tensor, convert, move, warp, global, local, shared, copy };
constexpr int pipes = 13;
constexpr const char *pipe_names[pipes] = {"control", "integer", "fp32",   "fp64",  "special", "tensor", "convert",
                                           "move",    "warp",    "global", "local", "shared",  "copy"};

struct Instruction {
    Handler run = nullptr;  // null if `control` defines the instruction
    Mover move = nullptr;   // for loads and stores
    Control control = Control::none;
    Reduction reduction = Reduction::none;
    Pipe pipe = Pipe::control;
    uint8_t writes = 0, reads = 0;  // numbers of output and input operands
    uint8_t bytes = 0, vector = 1;  // for a load, store or copy: bytes of an element, elements
    uint8_t machine = 1;            // number of machine instructions for it
    uint8_t joined = 1;  // loads of neighbouring words of shared memory that this one represents; 0: another load represents it
    int looped = -1;     // for a load of a word of shared memory in a loop: its number among such loads of the kernel
    bool guard_negated = false;
    int guard = -1;                    // the predicate's slot
    int operands[most_operands] = {};  // slots: outputs, then inputs
    int64_t offsets[3] = {};           // of the addresses, in operand order
    int target = -1, join = -1;        // for a branch: its target, and the instruction where both paths join again
    uint8_t unrolled =
        1;  // for a branch: copies of the loop body in the machine code's basic block; 0: the machine code has no branch
    bool constant = false;          // a load from read-only memory (.nc)
    int line = 0;                   // in the module's text
    std::vector<int> accumulators;  // slots of wgmma's sums
    float work = 1;                 // of the tensor cores, in bf16 products of m16n8k16; of the special functions, per lane
    uint32_t flop = 0;              // of the tensor cores, per warp
};

struct Parameter {
    size_t offset, bytes;
};

// A variable of a module or of a function.
struct Variable {
    std::string space, name;                                          // "shared", "local", "global" or "const"
    size_t align = 1, bytes = 0;                                      // 0: dynamic shared memory
    int line = 0;                                                     // of its declaration in a function
    std::string unknown;                                              // the part of its initial value that could not be parsed
    std::unique_ptr<uint8_t, decltype(&free)> memory{nullptr, free};  // for the spaces global and const
};

struct Preset {  // a slot with an initial value
    int slot, bytes;
    uint64_t bits;
    std::string special;  // a special register, "%tid.x"; if empty, `bits` are the value
};

struct Kernel {
    std::string mangled, name;  // the name is demangled, with template arguments, without namespace and parameters
    std::vector<Parameter> parameters;
    std::vector<std::string> types;  // of the parameters, as in C++
    size_t parameter_bytes = 0;

    std::vector<Instruction> code;
    std::vector<std::string> text;  // of each instruction
    std::vector<Preset> presets;
    int slots = 0, looped = 0;
    size_t static_shared = 0, local_bytes = 0;  // bytes per block, before its dynamic shared memory; bytes per thread
    int architecture = 90;                      // of the module's target GPU: sm_90
    uint32_t registers = 0;                     // of a thread at the start, if directives determine them
    std::vector<const Variable *> variables;    // of the module, in device memory
    int cell_bytes = 4;                         // granularity of the checks of shared memory
    unsigned cluster[3] = {1, 1, 1};            // blocks per cluster, unless the launch sets another number
    bool uses_wgmma = false, uses_tma = false;
};

// The text is read at construction; a kernel is decoded on first use.
class Module {
  public:
    explicit Module(std::string text);
    static Module read(const std::string &path);

    std::vector<std::string> entries() const;  // mangled
    const Kernel &kernel(const std::string &mangled);
    const std::string &text() const { return text_; }

  private:
    void declarations();

    struct Entry {
        size_t parameters, body;  // where they begin in the text
        std::unique_ptr<Kernel> kernel;
    };
    std::string text_;
    std::map<std::string, Entry> entries_;
    std::map<std::string, Variable> variables_;
    int architecture_ = 90;
    std::unique_ptr<std::mutex> lock_ = std::make_unique<std::mutex>();  // ranks can be threads
};

// Replaces products and sums by fma instructions, as ptxas does: contraction.cpp.
void contract(Kernel &kernel);

// Returns each instruction's nearest post-dominator, the first instruction on all paths from it to the end; the end is code.size().
std::vector<int> joins(const std::vector<Instruction> &code);

// Makes loads of neighbouring words of shared memory in a basic block count as one wide load, because ptxas joins them.
void join_loads(std::vector<Instruction> &code);

// Calls f(first word, words) for each load that ptxas emits to read `words` words from `word` on: one of 16 bytes for three or four words of an aligned
// group of four, one of 8 bytes for an aligned pair, else one per word.
template <class F> void each_wide_load(uint32_t word, uint32_t words, F f) {
    for (const uint32_t end = word + words; word < end;) {
        const uint32_t group = word & ~3u, next = std::min(group + 4, end), wanted = next - word;
        if (wanted >= 3) f(group, 4);
        else if (wanted == 2 && word % 2 == 0) f(word, 2);
        else
            for (uint32_t n = word; n < next; n++) f(n, 1);
        word = next;
    }
}

// Numbers the loads of a word of shared memory in loops of one basic block, for count_looped, and returns their count.
int number_looped_loads(std::vector<Instruction> &code);

// Marks branches that the machine code does not contain: ptxas replaces a branch over a few instructions by predicates, and unrolls a small loop four
// times if its counter grows by a constant. `constants`: slots that hold constants.
void find_machine_blocks(std::vector<Instruction> &code, const std::set<int> &constants);

// An instruction's handler, and the widths of its operands in bytes; 0 is a predicate. Addresses count as operands.
struct Form {
    Handler run = nullptr;
    Pipe pipe = Pipe::move;
    uint8_t writes = 0;
    std::vector<uint8_t> widths;
    Mover move = nullptr;
    uint8_t bytes = 0, vector = 1;
    Handler flushed = nullptr;  // the same with .ftz
    int architecture = 0;       // of the first GPUs that have it: 100 is sm_100
};
using Forms = std::map<std::string, Form>;  // by full name, such as "fma.rn.f32"
void add_arithmetic(Forms &forms);          // arithmetic.cpp
void add_warp_operations(Forms &forms);     // warp_operations.cpp
void add_memory_operations(Forms &forms);   // memory_operations.cpp
void add_system_calls(Forms &forms);        // system_calls.cpp
void add_mbarriers(Forms &forms);           // mbarrier.cpp
void add_bulk_copies(Forms &forms);         // bulk_copies.cpp
void add_wgmma(Forms &forms);               // wgmma.cpp
void add_clusters(Forms &forms);            // cluster.cpp: clusters and other instructions of sm_90
}  // namespace ptx
