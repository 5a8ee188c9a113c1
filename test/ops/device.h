// The tests of an op are written once. Compiled plainly they run on the CPU's devices; compiled for the emulator or by nvcc they run on CUDA's.
// This file has the differences: the devices, the arrays in their memory, and the orders of an op's threads.
#pragma once
#include "../../llmc/core/common.h"
#include "../check.h"

#ifdef CUDA_HALF
#include "../cuda/check.cuh"

using Devices = CudaDevices;
template <class T> using Array = DeviceArray<T>;
template <class X> using FloatsArray = DeviceFloats<X>;

template <class Dev> Dev any_device() { return {}; }
#else
using Devices = CpuDevices;
template <class T> using Array = HostArray<T>;
template <class X> using FloatsArray = HostFloats<X>;

template <class Dev> Dev any_device() { return make_device<Dev>(); }
struct MatmulContext {  // make_device has set the context of products; CUDA's version is in test/cuda/matmul_context.cuh
    template <class Dev> Dev device(Dev dev) const { return dev; }
};

// Runs the body with one thread and with several, which run in any order. A failed EXPECT_... names their number.
template <class Dev, class Body> void for_each_order(Body body) {
    for (const int threads : {1, 2, 3}) {
        SCOPED_TRACE(format("%d threads", threads));
        body(make_device<Dev>(threads));
    }
}
#endif
