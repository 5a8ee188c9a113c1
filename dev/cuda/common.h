// The workshop's harness. A ladder is a file dev/cuda/NAME.cu: versions of one op, from the obvious kernel (1) to the shipped one
// (the last), which is included from llmc/ops and called through its launcher. g++ compiles the file for the emulator and nvcc
// for a GPU; build/dev/cuda/NAME holds both, and its main() is common.cpp. A ladder is a template of the storage type:
//
//     namespace CUDA_BACKEND::workshop {                           // so that op_kernel2 here is not the op_kernel2 of llmc/ops
//     template <class X> struct Op {
//         explicit Op(const Sizes &sizes);                       // inputs on the device, outputs full of NaN; may refuse sizes: die()
//         static constexpr void (*versions[])(Cuda<X>, X *out, const X *x, size_t n) = {op1, op2, op_forward};
//         void run(Cuda<X> dev, size_t version) { versions[version - 1](dev, out.data(), x.data(), n); }
//         void check(Check &check) const;                          // check("out", out.values(), reference, allowed), each output
//         Work work() const;                                       // the least work of any version
//         bool runs(size_t version) const;                         // optional: false if the version excludes this type or these sizes
//         static constexpr size_t last_version;                    // optional: number of versions, if run() itself calls the last ones
//     };
//     static const Ladder<Op, float, bf16> ladder({.name = "op", .sizes = {{"T", "tokens", 8192, 512}}, .checked = {{1}, {7}},
//                                                  .ideas = {"a thread per row", "a warp per row", "the shipped kernel"}});
//     }
//
// Each version is checked in each type at each of the shapes `checked`, on a new Op. In the emulator it runs with three orders of threads,
// which must give the same bits. On a GPU an Op of the last type with the timed shape of `sizes` is timed. There run() is called many
// times; it may accumulate, and may overwrite its inputs if their values do not change the time. The PTX interpreter counts the work of
// such an Op at the counted shape of `sizes`.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../../test/cuda/check.cuh"
#include "../emulator/counts.h"

// ---- description and run of a ladder-------------------------------------------------------------------------------------------

using Sizes = std::vector<size_t>;

struct Size {
    const char *name, *meaning;
    size_t timed, counted;  // counted: the smaller size for the emulator and the PTX interpreter
};

struct Description {
    const char *name;                 // of the file
    std::vector<Size> sizes;          // of --shape, with the timed and the counted values
    std::vector<Sizes> checked;       // shapes for the checks: small and ragged
    std::vector<const char *> ideas;  // a line for each version
};

// Either bytes or FLOP. Bytes count each input and each output once, the same for all versions, so the rates of two versions compare like their
// times; the table shows a rate as a share of a copy's. FLOP rates are shown as a share of a large bf16 product's. The copy and the product
// are measured in the same run.
struct Work {
    double bytes = 0, flops = 0;
};

// Compares a version's output with the reference, and with its own output in the first order of threads.
class Check {
    std::map<std::string, SameBits> bits_;

  public:
    double worst = 0;  // the largest error / allowed

    // `allowed` is an absolute error, derived as in the op's test, or 0 if the bits are known.
    template <class A, class B>
    void operator()(const char *what, const std::vector<A> &got, const std::vector<B> &want, double allowed) {
        if (got.size() != want.size()) die("%s: %zu values, but the reference has %zu", what, got.size(), want.size());
        for (size_t i = 0; i < got.size(); i++) {
            const double error = std::abs(double(got[i]) - double(want[i]));
            if (!(error <= allowed))
                die("%s[%zu] is %.9g and should be %.9g, give or take %.2g", what, i, double(got[i]), double(want[i]), allowed);
            if (error > 0) worst = std::max(worst, error / allowed);
        }
        if (!bits_[what].hold(got)) die("%s has other bits than in another order of threads", what);
    }
};

// ---- interface for common.cpp --------------------------------------------------------------------------------------------------

struct Timed {  // an Op on the GPU
    virtual ~Timed() = default;
    virtual void run(size_t version) = 0;
    virtual bool runs(size_t version) const = 0;
    virtual Work work() const = 0;
};

struct AnyLadder {  // on one backend
    Description about;
    std::vector<const char *> dtypes;
    size_t versions;  // number of versions of the Op

    virtual ~AnyLadder() = default;
    virtual std::optional<double> check(size_t dtype, size_t version, const Sizes &) const = 0;  // the largest error / allowed
    virtual std::unique_ptr<Timed> timed(const Sizes &) const = 0;
    virtual std::vector<KernelCounts> count(Timed &, size_t version) const = 0;  // in the emulator
};

struct Gpu {  // timing.cu
    struct Seconds {
        double median, best;
    };
    virtual ~Gpu() = default;
    virtual std::string name() const = 0;                              // of the device; empty without a GPU
    virtual Seconds time(const std::function<void()> &run) const = 0;  // of one run, with a cold L2 cache
    virtual double copied_per_second() const = 0;                      // bytes read and bytes written by a large copy
    virtual double multiplied_per_second() const = 0;                  // FLOP of a large bf16 product
};

struct Interpreter {  // ptx/ladder.cpp, in programs that run nvcc's PTX on the CPU
    virtual ~Interpreter() = default;
    virtual std::vector<std::string> not_run() const = 0;  // kernels of this program without a launch so far
    virtual size_t kernels() const = 0;                    // number of kernels in this program
    // Prints the counts of a run.
    virtual void count(const std::string &what, const std::function<void()> &run, size_t sample, bool csv) const = 0;
};

// The ladder, timing.cu and ptx/ladder.cpp set these before main(); null if the program does not contain them.
inline const AnyLadder *emulated_ladder = nullptr, *gpu_ladder = nullptr;
inline const Gpu *the_gpu = nullptr;
inline const Interpreter *the_interpreter = nullptr;

// ---- a ladder on this backend --------------------------------------------------------------------------------------------------

namespace CUDA_BACKEND::workshop {
template <class Op> bool op_runs(const Op &op, size_t version) {
    if constexpr (requires { op.runs(version); }) return op.runs(version);
    else return true;
}

template <class Op> constexpr size_t last_version() {
    if constexpr (requires { Op::last_version; }) return Op::last_version;
    else return sizeof(Op::versions) / sizeof(Op::versions[0]);  // nvcc does not know std::size of it
}

template <class Dev> const char *order_name([[maybe_unused]] Dev dev) {
#ifdef LLMC_EMULATE
    const unsigned order = dev.stream->order;
    return order == 0 ? ", lowest threads first" : order == 1 ? ", highest threads first" : ", threads in random order";
#else
    return "";
#endif
}

template <template <class> class Op, class... X> class Ladder : public AnyLadder {
    template <class T> static std::optional<double> check_as(size_t version, const Sizes &sizes) {
        Check check;
        bool ran = true;
        for_each_order<Cuda<T>>([&](Cuda<T> dev) {
            try {
                Op<T> op(sizes);
                if (!(ran = op_runs(op, version))) return;
                op.run(dev, version);
                if (const cudaError_t error = cudaStreamSynchronize(dev.stream)) die("%s", cudaGetErrorString(error));
                op.check(check);
            } catch (const Error &error) {
                die("%s%s: %s", dtype_name<T>, order_name(dev), error.what());
            }
        });
        return ran ? std::optional(check.worst) : std::nullopt;
    }

    template <class T> struct TimedOp : Timed {
        Op<T> op;
        explicit TimedOp(const Sizes &sizes) : op(sizes) {}
        void run(size_t version) override { op.run({}, version); }
        bool runs(size_t version) const override { return op_runs(op, version); }
        Work work() const override { return op.work(); }
    };

  public:
    explicit Ladder(Description description) {
        about = std::move(description);
        dtypes = {dtype_name<X>...};
        versions = std::max({last_version<Op<X>>()...});
#ifdef LLMC_EMULATE
        emulated_ladder = this;
#else
        gpu_ladder = this;
#endif
    }

    std::optional<double> check(size_t dtype, size_t version, const Sizes &sizes) const override {
        static constexpr std::optional<double> (*checks[])(size_t, const Sizes &) = {check_as<X>...};
        return checks[dtype](version, sizes);
    }

    std::vector<KernelCounts> count([[maybe_unused]] Timed &op, [[maybe_unused]] size_t version) const override {
#ifdef LLMC_EMULATE
        return simt::counted([&] { op.run(version); });
#else
        return {};
#endif
    }

    std::unique_ptr<Timed> timed(const Sizes &sizes) const override {
        return std::make_unique<TimedOp<std::tuple_element_t<sizeof...(X) - 1, std::tuple<X...>>>>(sizes);
    }
};
}  // namespace CUDA_BACKEND::workshop
