// Ranks that are processes (or threads) with a GPU each: slices are in its memory and go from GPU to GPU by NCCL.
//
// No call waits on the host. Its work is queued on a stream that all communicators of the rank share. The work begins when the compute stream
// has finished everything queued before. The compute stream waits for it in turn: at wait() after exchange() and start(), at once after
// any other call. So one call runs at a time, and an exchange waits for a sum that was started before it. (Two communicators at
// the same time may deadlock, because their kernels occupy part of a GPU until all ranks have come.)
//
// NCCL chooses the order of sums. all_reduce_sum gives the same bits on all ranks. bf16 is rounded within the sum. Training sums
// gradients in float.
//
// A thread watches the queued work. When NCCL reports an error, be it of another rank, or CUDA does, or a call is not done `timeout` seconds
// after it could start, the thread prints an error, aborts the communicators, and ends the process, since the host may be waiting for the
// GPU for ever.
#pragma once
#include "../core/device.h"
#include "comm.h"

// Makes a GPU the current one of this thread, so that ranks of a host take one each (core/gpu.h). All die with one message if there are too few.
void select_gpu(Comm &host);

// Returns a communicator of the ranks of `host`, which serves for agreement and must outlive it; split() also splits `host`. Slices are in the
// memory of this thread's current GPU; `compute` is a stream of it. In a program built without NCCL all ranks die with one message. The
// emulator has an NCCL for ranks that are threads, and dev/emulator/emulated_processes.h for processes.
std::unique_ptr<Comm> make_gpu_comm(Comm &host, cudaStream_t compute, double timeout);
