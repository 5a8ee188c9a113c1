// Ranks as processes (or threads) with one GPU each: slices are in GPU memory, and NCCL moves them between GPUs.
//
// No call waits on the host. A call's work is queued on a stream that all communicators of the rank share. It begins when the compute stream has
// finished all work queued before. The compute stream then waits for the call: at wait() after exchange() and start(), and at once after any
// other call. So one call runs at a time, and an exchange waits for a sum that was started before it. (Two concurrent communicators may deadlock,
// because their kernels occupy part of a GPU until all ranks have arrived.)
//
// NCCL chooses the order of sums. all_reduce_sum gives the same bits on all ranks. bf16 is rounded within the sum. Training sums
// gradients in float.
//
// A thread watches the queued work. If NCCL or CUDA reports an error, possibly of another rank, or if a call is not done `timeout` seconds after it
// could start, the thread prints an error, aborts the communicators, and ends the process, because the host may be waiting for the GPU forever.
#pragma once
#include "../core/device.h"
#include "comm.h"

// Selects a GPU for this thread, so the ranks of a host use one each (core/gpu.h). All ranks die with one message if there are too few.
void select_gpu(Comm &host);

// Returns a communicator of the ranks of `host`. `host` is used for agreement and must outlive the result; split() also splits `host`. Slices are in
// the memory of this thread's current GPU; `compute` is a stream of that GPU. In a program built without NCCL all ranks die with one message. The
// emulator has an NCCL for ranks that are threads, and dev/emulator/emulated_processes.h for processes.
std::unique_ptr<Comm> make_gpu_comm(Comm &host, cudaStream_t compute, double timeout);
