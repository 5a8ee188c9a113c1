// Device memory, and the stream of a model's kernels and copies.
#pragma once
#include <array>
#include <cstring>

#include "launch.cuh"
#include "memory.h"

inline namespace CUDA_BACKEND {
inline void cuda_check(cudaError_t error, const char *what) {
    if (error)
        die("%s: %s (cuda error %d)\n  fix: nvidia-smi shows the driver, the GPU's free memory and what else uses it", what,
            cudaGetErrorString(error), int(error));
}

// Checks a call that waits for the stream. Errors of earlier kernels appear here: illegal addresses, ECC errors.
inline void cuda_check_kernels(cudaError_t error) {
    if (error)
        die("a kernel or copy before this failed: %s (cuda error %d)\n  fix: CUDA_LAUNCH_BLOCKING=1 in the environment names the kernel; "
            "for ECC errors another GPU",
            cudaGetErrorString(error), int(error));
}

// The blocks of an urgent stream's kernels are scheduled before other streams' waiting blocks. NCCL's kernels are urgent: they are short, and
// would otherwise only begin at the end of a product with thousands of blocks (CUDA C++ Programming Guide, "Stream Priorities").
enum class StreamPriority { normal, urgent };

class CudaStream {
  public:
    explicit CudaStream(StreamPriority priority = StreamPriority::normal) {
        int least = 0, greatest = 0;
        cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "no priorities of streams");
        cuda_check(
            cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority == StreamPriority::urgent ? greatest : least),
            "no stream");
    }
    ~CudaStream() { cudaStreamDestroy(stream_); }
    CudaStream(const CudaStream &) = delete;
    CudaStream &operator=(const CudaStream &) = delete;
    operator cudaStream_t() const { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

// Copies keep the order of the stream. Data from the host waits for its copy in one of two halves of pinned memory, so the host only waits when
// both halves are full. A read waits for the stream, and reports an error of any earlier kernel.
class CudaMemory final : public Memory {
  public:
    explicit CudaMemory(cudaStream_t stream) : stream_(stream) {
        cuda_check(cudaGetDevice(&device_), "no current GPU");
        for (Half &half : halves_) {
            cuda_check(cudaMallocHost(&half.bytes, half_bytes), "no pinned memory");
            cuda_check(cudaEventCreateWithFlags(&half.copied, cudaEventDisableTiming), "no event");
        }
    }
    ~CudaMemory() override {
        for (Half &half : halves_) {
            cudaFreeHost(half.bytes);
            cudaEventDestroy(half.copied);
        }
    }
    CudaMemory(const CudaMemory &) = delete;
    CudaMemory &operator=(const CudaMemory &) = delete;

    std::string device() const override {
        int device = 0;
        cudaDeviceProp properties;
        cuda_check(cudaGetDevice(&device), "no current GPU");
        cuda_check(cudaGetDeviceProperties(&properties, device), "the GPU does not tell its name");
        return properties.name;
    }
    size_t available() const override {
        size_t free = 0, total = 0;
        cuda_check(cudaMemGetInfo(&free, &total), "the GPU does not tell its memory");
        return free;
    }
    // The driver loads a kernel at its first launch, cuBLASLt's kernels take up to a few MiB each, and each NCCL communicator allocates its buffers
    // at the first call: by default 9.4 MiB per channel (4 for messages, the rest for its two low-latency protocols) and 32 channels. The world's
    // communicator, which sums, has a ring and two connections of a tree; other communicators have half of that. These are estimates, never measured.
    size_t reserve(size_t communicators) const override {
        return (size_t(256) << 20) + (communicators ? (communicators + 1) * (size_t(512) << 20) : 0);
    }
    size_t process() const override { return used(); }
    size_t peak() const override { return used(); }  // memory is never freed during a run

    void use_on_this_thread() override { cuda_check(cudaSetDevice(device_), "the GPU cannot be used"); }
    std::byte *allocate(size_t bytes) override {
        std::byte *base = nullptr;
        if (cudaError_t error = cudaMalloc(&base, bytes))
            die("cannot allocate %s of %s free on the GPU: %s\n  fix: see --plan; a smaller --row_tokens or --recompute layer needs less",
                human_bytes(bytes).c_str(), human_bytes(available()).c_str(), cudaGetErrorString(error));
        fill(base, 0, bytes);
        return base;
    }
    void release(std::byte *base, size_t) override { cudaFree(base); }
    void fill(void *to, uint8_t byte, size_t bytes) override {
        cuda_check(cudaMemsetAsync(to, byte, bytes, stream_), "filling device memory");
    }
    void write(void *to, const void *host, size_t bytes) override {
        const char *from = static_cast<const char *>(host);
        in_parts(
            bytes, [&](size_t first, size_t n) { write_part(static_cast<char *>(to) + first, from + first, n); }, half_bytes);
    }
    void read(void *host, const void *from, size_t bytes) override {
        cuda_check(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, stream_), "copying from the GPU");
        cuda_check_kernels(cudaStreamSynchronize(stream_));
    }

  private:
    static constexpr size_t half_bytes = size_t(4) << 20;
    struct Half {
        std::byte *bytes = nullptr;
        cudaEvent_t copied = nullptr;
    };

    void write_part(void *to, const void *from, size_t n) {
        if (used_of_half_ + n > half_bytes) {
            cuda_check(cudaEventRecord(halves_[half_].copied, stream_), "copying to the GPU");
            half_ = 1 - half_, used_of_half_ = 0;
            cuda_check(cudaEventSynchronize(halves_[half_].copied), "copying to the GPU");
        }
        std::byte *waiting = halves_[half_].bytes + used_of_half_;
        used_of_half_ += n;
        memcpy(waiting, from, n);
        cuda_check(cudaMemcpyAsync(to, waiting, n, cudaMemcpyHostToDevice, stream_), "copying to the GPU");
    }

    size_t used() const {
        size_t free = 0, total = 0;
        cuda_check(cudaMemGetInfo(&free, &total), "the GPU does not tell its memory");
        return total - free;
    }

    cudaStream_t stream_;
    int device_ = 0;
    std::array<Half, 2> halves_;
    size_t half_ = 0, used_of_half_ = 0;
};

template <class X> std::unique_ptr<Memory> make_memory(Cuda<X> dev) { return std::make_unique<CudaMemory>(dev.stream); }
}  // namespace CUDA_BACKEND
