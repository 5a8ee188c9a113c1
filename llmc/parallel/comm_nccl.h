// Ranks that are processes (or threads) with a GPU each: slices lie in its memory and go from GPU to GPU by NCCL.
//
// No call waits on the host. What it does is queued on a stream that all communicators of the rank share: it begins when the compute stream
// has done what it was given so far, and the compute stream waits for it in turn: at wait() after exchange() and start(), at once after
// any other call. So one call runs at a time, and an exchange waits for a sum that was started before it. (Two communicators at
// once may lock: their kernels take part of a GPU until all ranks have come.)
//
// NCCL sums in an order that is its own business. All ranks have the same bits of all_reduce_sum; bf16 is rounded on the way. Training sums
// gradients in float.
//
// A thread watches what is queued. When NCCL reports an error (of another rank, too), or something has not been done `timeout` seconds
// after it was queued, it says so, aborts the communicators, and ends the process: the host may be waiting for the GPU, for ever.
#pragma once
#include "../core/device.h"
#include "comm.h"

// Makes a GPU the current one of this thread, so that ranks of a host take one each (core/gpu.h). All die with one message if there are too few.
void select_gpu(Comm &host);

// Ranks as in `host`, which serves for agreement and outlives what is returned; split() splits it, too. Slices lie in the memory of this
// thread's current GPU; `compute` is a stream of it. In a program built without NCCL all ranks die with one message. In the emulator,
// where device memory is the host's, slices go the way of `host`.
std::unique_ptr<Comm> make_gpu_comm(Comm &host, cudaStream_t compute, double timeout);
