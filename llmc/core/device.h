// The devices a trainer can be instantiated for. A device value travels as the first argument of every op; it carries what the
// op needs to run, and its type says where the arrays live and how weights and activations are stored.
#pragma once
#include <memory>

#include "dtype.h"

struct Context;  // what a device remembers between calls (oneDNN primitives): ops/matmul.cpp
struct ContextDeleter {
    void operator()(Context *) const;
};
using ContextPtr = std::unique_ptr<Context, ContextDeleter>;
ContextPtr make_context(int threads);  // owned by run(), alive as long as the device value

template <class Storage> struct Cpu {
    using X = Storage;  // weights and activations; sums, statistics, parameter gradients and the optimizer are float
    int threads;
    Context *ctx = nullptr;  // only matmul and attention need one
};
using CpuF32 = Cpu<float>;
using CpuBf16 = Cpu<bf16>;
