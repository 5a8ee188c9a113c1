// The linear layer on CUDA. Contract and formulas: matmul.h. cuBLASLt computes the products, adds the bias in their
// epilogue, and adds to dw in place; the emulator calls the CPU's products. Sums may only be split if the parts are added in a fixed order.
#pragma once
#include <bit>
#include <map>
#include <memory>
#include <type_traits>
#include <vector>

#include "matmul.h"
#include "warp.cuh"
#ifndef LLMC_EMULATE
#include <cublasLt.h>

#include "../core/memory.cuh"
#include "algorithm_choices.h"
#endif

inline namespace CUDA_BACKEND {

// ---- cached state -----------------------------------------------------------------------------------------------------------------

#ifdef LLMC_EMULATE

struct CudaContext {
    int threads;
    ContextPtr cpu;
};
inline std::unique_ptr<CudaContext> make_cuda_context(int threads, bool /*tf32*/ = false, bool /*autotune*/ = false) {
    return std::make_unique<CudaContext>(CudaContext{threads, make_context()});
}

template <class X> constexpr size_t matmul_run(Cuda<X>) { return matmul_run(Cpu<X>{}); }
template <class X> size_t matmul_scratch(Cuda<X>) { return 0; }
template <class X> void matmul_use_scratch(Cuda<X>, void *) {}

template <class X> Cpu<X> emulating(Cuda<X> dev) { return {dev.ctx->threads, dev.ctx->cpu.get()}; }

template <class X, class Out>
void matmul_product(Cuda<X> dev, Out *out, const X *x, const X *w, const X *bias, size_t T, size_t IC, size_t OC, size_t ld,
                    bool accumulate) {
    simt::enqueue(dev.stream, [=] { matmul_forward(emulating(dev), out, x, w, bias, T, IC, OC, ld, accumulate); });
}
template <class X>
void matmul_product_dx(Cuda<X> dev, X *dx, const X *dout, const X *w, size_t T, size_t IC, size_t OC, size_t ld,
                       bool accumulate) {
    simt::enqueue(dev.stream, [=] { matmul_backward_input(emulating(dev), dx, dout, w, T, IC, OC, ld, accumulate); });
}
template <class X>
void matmul_product_dw(Cuda<X> dev, float *dw, const X *dout, const X *x, size_t T, size_t IC, size_t OC, bool accumulate,
                       size_t ld) {
    simt::enqueue(dev.stream, [=] { matmul_backward_weight(emulating(dev), dw, nullptr, dout, x, T, IC, OC, accumulate, ld); });
}

#else

inline void cublas_check(cublasStatus_t status, const char *what) {
    if (status != CUBLAS_STATUS_SUCCESS) die("cuBLASLt: %s: %s", what, cublasLtGetStatusString(status));
}

// D (m, n) = op(A) op(B) [+ bias] or D += op(A) op(B), column-major as in BLAS: our row-major arrays are the transposes.
struct MatmulShape {
    cudaDataType_t a_type, b_type, out;
    cublasOperation_t a_op, b_op;
    size_t m, n, k, a_ld, b_ld, d_ld;
    bool bias, accumulate;
    uint32_t alignment;  // of all pointers in bytes, as matmul_aligned says
    auto operator<=>(const MatmulShape &) const = default;
};

constexpr size_t matmul_workspace = 32 << 20;  // NVIDIA recommends this for Hopper

// Returns the alignment of pointers, in bytes, that cuBLASLt may assume. The bits of a product depend on the algorithm, and its choice depends on the
// alignment. So there are only three: 256 for whole arrays, 16 for parts that vectors can still read, and the element size for all others.
template <class X> uint32_t matmul_aligned(std::initializer_list<const void *> pointers) {
    uintptr_t bits = 0;
    for (const void *p : pointers) bits |= uintptr_t(p);
    return bits % array_alignment == 0 ? array_alignment : bits % 16 == 0 ? 16 : sizeof(X);
}

// The key for the choice of an algorithm. It does not depend on accumulation into D.
inline std::string product_name(const MatmulShape &s) {
    const char *const type = s.b_type == CUDA_R_32F ? "f32" : s.b_type == CUDA_R_16BF ? "bf16" : "e4m3";
    return format("%s %s, (%zu, %zu) %s %zu times (%zu, %zu) %s %zu to %zu, %saligned to %u", type,
                  s.out == CUDA_R_32F ? "f32" : "bf16", s.m, s.k, s.a_op == CUBLAS_OP_T ? "T" : "N", s.a_ld, s.k, s.n,
                  s.b_op == CUBLAS_OP_T ? "T" : "N", s.b_ld, s.d_ld, s.bias ? "bias, " : "", s.alignment);
}

struct MatmulPlan {
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t a, b, d;
    static constexpr int most_candidates = 16;
    std::vector<AlgorithmChoices::Algorithm> candidates;  // at least one, in the order of the speed that cuBLASLt expects
    cublasLtMatmulAlgo_t algorithm;                       // the first candidate, unless trials find a faster one

    MatmulPlan(cublasLtHandle_t handle, cublasComputeType_t floats, const MatmulShape &s, int wanted,
               const void *bias) {  // any bias with that alignment
        const auto compute = s.a_type == CUDA_R_32F ? floats : CUBLAS_COMPUTE_32F;
        cublas_check(cublasLtMatmulDescCreate(&product, compute, CUDA_R_32F), "a description of a product");
        set(CUBLASLT_MATMUL_DESC_TRANSA, s.a_op);
        set(CUBLASLT_MATMUL_DESC_TRANSB, s.b_op);
        if (s.bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        if (s.bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, s.out);
        if (s.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);  // its alignment affects the choice of an algorithm
        a = layout(s.a_type, s.a_op == CUBLAS_OP_N ? s.m : s.k, s.a_op == CUBLAS_OP_N ? s.k : s.m, s.a_ld);
        b = layout(s.b_type, s.b_op == CUBLAS_OP_N ? s.k : s.n, s.b_op == CUBLAS_OP_N ? s.n : s.k, s.b_ld);
        d = layout(s.out, s.m, s.n, s.d_ld);

        cublasLtMatmulPreference_t preference;
        cublas_check(cublasLtMatmulPreferenceCreate(&preference), "a preference");
        const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
            cublas_check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value), "a preference");
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, matmul_workspace);
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
               uint32_t(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, s.alignment);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, s.alignment);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, s.alignment);
        prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, s.alignment);
        cublasLtMatmulHeuristicResult_t found[most_candidates];
        int count = 0;
        const auto status = cublasLtMatmulAlgoGetHeuristic(handle, product, a, b, d, d, preference, wanted, found, &count);
        cublasLtMatmulPreferenceDestroy(preference);
        for (int i = 0; i < count; i++)  // an answer is only valid if its state is SUCCESS
            if (found[i].state == CUBLAS_STATUS_SUCCESS)
                candidates.push_back(std::bit_cast<AlgorithmChoices::Algorithm>(found[i].algo));
        if (candidates.empty())
            die("cuBLASLt has no algorithm for a product of (%zu, %zu) and (%zu, %zu) aligned to %u bytes: %s", s.m, s.k, s.k,
                s.n, s.alignment,
                cublasLtGetStatusString(status == CUBLAS_STATUS_SUCCESS && count > 0 ? found[0].state : status));
        use(candidates[0]);
    }
    MatmulPlan(const MatmulPlan &) = delete;
    MatmulPlan &operator=(const MatmulPlan &) = delete;
    ~MatmulPlan() {
        cublasLtMatmulDescDestroy(product);
        for (auto matrix : {a, b, d}) cublasLtMatrixLayoutDestroy(matrix);
    }

    template <class Value> void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
        cublas_check(cublasLtMatmulDescSetAttribute(product, attribute, &value, sizeof value), "an attribute of a product");
    }

    void use(const AlgorithmChoices::Algorithm &words) { algorithm = std::bit_cast<cublasLtMatmulAlgo_t>(words); }

  private:
    static cublasLtMatrixLayout_t layout(cudaDataType_t type, size_t rows, size_t columns, size_t ld) {
        cublasLtMatrixLayout_t matrix;
        cublas_check(cublasLtMatrixLayoutCreate(&matrix, type, rows, columns, int64_t(ld)), "the layout of a matrix");
        return matrix;
    }
};

struct CudaContext {
    const cublasComputeType_t compute;  // of floats
    cublasLtHandle_t handle = nullptr;
    void *workspace = nullptr;
    // The heuristic takes longer than a launch, so its answers are cached; beyond a limit the least recently used one is dropped.
    struct Kept {
        std::unique_ptr<MatmulPlan> plan;
        size_t last_use;
    };
    static constexpr size_t most_plans = 512;
    std::map<MatmulShape, Kept> plans;
    size_t uses = 0;
    std::unique_ptr<AlgorithmChoices> choices;  // null: cuBLASLt's heuristic chooses

    CudaContext(cublasComputeType_t compute, bool autotune) : compute(compute) {
        cublas_check(cublasLtCreate(&handle), "no handle");
        if (!autotune) return;
        int number = 0;
        cudaDeviceProp gpu;
        cuda_check(cudaGetDevice(&number), "no current GPU");
        cuda_check(cudaGetDeviceProperties(&gpu, number), "the GPU does not tell its name");
        choices =
            std::make_unique<AlgorithmChoices>(format("%s, cuBLASLt %zu, sums %d", gpu.name, cublasLtGetVersion(), int(compute)));
    }
    CudaContext(const CudaContext &) = delete;
    CudaContext &operator=(const CudaContext &) = delete;
    ~CudaContext() {
        plans.clear();
        cublasLtDestroy(handle);
    }

    // try_one(plan) computes the product by plan.algorithm and returns its time.
    template <class TryOne> MatmulPlan &plan(const MatmulShape &shape, const void *bias, const TryOne &try_one) {
        uses++;
        if (const auto found = plans.find(shape); found != plans.end()) {
            found->second.last_use = uses;
            return *found->second.plan;
        }
        if (plans.size() >= most_plans)
            plans.erase(std::min_element(plans.begin(), plans.end(),
                                         [](auto &a, auto &b) { return a.second.last_use < b.second.last_use; }));
        auto plan = std::make_unique<MatmulPlan>(handle, compute, shape, choices ? MatmulPlan::most_candidates : 1, bias);
        if (choices) choose(*plan, shape, try_one);
        return *plans.emplace(shape, Kept{std::move(plan), uses}).first->second.plan;
    }

  private:
    // Trials write D, so only products that do not add to D can be tried in place, as in the first row of a step. A product that adds to D, and has
    // no choice yet, uses cuBLASLt's first candidate. This choice is also saved, because the next run must make the same one.
    template <class TryOne> void choose(MatmulPlan &plan, const MatmulShape &shape, const TryOne &try_one) const {
        const std::string name = product_name(shape);
        const AlgorithmChoices::Algorithm *kept = choices->find(name);
        if (!kept) {
            AlgorithmChoices::Algorithm fastest = plan.candidates[0];
            double least = HUGE_VAL;
            for (size_t i = 0; i < plan.candidates.size() && !shape.accumulate; i++) {
                plan.use(plan.candidates[i]);
                try_one(plan);  // the first product of an algorithm loads its kernel, so it is not timed
                const double time = std::min({try_one(plan), try_one(plan), try_one(plan)});
                if (time < least) least = time, fastest = plan.candidates[i];
            }
            kept = &choices->keep(name, fastest);
        }
        plan.use(*kept);
        cublasLtMatmulHeuristicResult_t checked;
        const auto status =
            cublasLtMatmulAlgoCheck(handle, plan.product, plan.a, plan.b, plan.d, plan.d, &plan.algorithm, &checked);
        if (status != CUBLAS_STATUS_SUCCESS || checked.workspaceSize > matmul_workspace)
            die("%s: cuBLASLt refuses the algorithm for %s\n  fix: remove the file; the next run writes a new one",
                choices->path().c_str(), name.c_str());
    }
};
// tf32: products of floats run on tensor cores, which read them as TF32, with 10 bits of fraction. autotune: trials at the first use of a product on
// a GPU model find the fastest of cuBLASLt's candidates; AlgorithmChoices stores it.
inline std::unique_ptr<CudaContext> make_cuda_context(int /*threads*/, bool tf32 = false, bool autotune = false) {
    return std::make_unique<CudaContext>(tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, autotune);
}

// dw is read and written once per run, 8 bytes per element for 2 * matmul_run FLOP: on an H100 a twentieth of the product's time, by formula.
template <class X> constexpr size_t matmul_run(Cuda<X>) { return 16384; }
template <class X> size_t matmul_scratch(Cuda<X>) { return matmul_workspace; }
template <class X> void matmul_use_scratch(Cuda<X> dev, void *scratch) {
    if (!dev.ctx) return;  // a model that is only planned computes nothing
    if (uintptr_t(scratch) % array_alignment)
        die("cuBLASLt's workspace begins at %p, which is not aligned to %zu bytes", scratch, array_alignment);
    dev.ctx->workspace = scratch;
}

template <class X> constexpr cudaDataType_t cuda_type = sizeof(X) == 2 ? CUDA_R_16BF : CUDA_R_32F;

// A or B of a product, stored with `ld` elements from one column to the next.
struct MatmulOperand {
    const void *data;
    cudaDataType_t type;
    cublasOperation_t op;
    size_t ld;
    const float *scale = nullptr;  // in the GPU's memory; it multiplies an FP8 operand

    template <class X>
    MatmulOperand(const X *data, cublasOperation_t op, size_t ld) : data(data), type(cuda_type<X>), op(op), ld(ld) {}
    MatmulOperand(const void *data, cudaDataType_t type, cublasOperation_t op, size_t ld, const float *scale)
        : data(data), type(type), op(op), ld(ld), scale(scale) {}
};

template <class X, class Out>
void cublas_product(Cuda<X> dev, Out *D, size_t ld, MatmulOperand A, MatmulOperand B, const X *bias, size_t m, size_t n, size_t k,
                    bool accumulate) {
    if (!dev.ctx->workspace) die("a product before matmul_use_scratch, or after its memory was freed");
    const auto multiply = [&](const MatmulPlan &plan) {
        const float one = 1, beta = accumulate ? 1 : 0;
        cublas_check(cublasLtMatmul(dev.ctx->handle, plan.product, &one, A.data, plan.a, B.data, plan.b, &beta, D, plan.d, D,
                                    plan.d, &plan.algorithm, dev.ctx->workspace, matmul_workspace, dev.stream),
                     "a product");
    };
    const auto point = [&](MatmulPlan &plan) {  // sets the pointers of this call
        if (bias) plan.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
        if (A.scale) plan.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, A.scale);
        if (B.scale) plan.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, B.scale);
    };
    const auto try_one = [&](MatmulPlan &plan) {
        point(plan);
        cudaEvent_t begin, end;
        float milliseconds = 0;
        for (cudaEvent_t *event : {&begin, &end}) cuda_check(cudaEventCreateWithFlags(event, cudaEventDefault), "no event");
        cuda_check(cudaEventRecord(begin, dev.stream), "timing an algorithm");
        multiply(plan);
        cuda_check(cudaEventRecord(end, dev.stream), "timing an algorithm");
        cuda_check(cudaEventSynchronize(end), "timing an algorithm");
        cuda_check(cudaEventElapsedTime(&milliseconds, begin, end), "timing an algorithm");
        for (cudaEvent_t event : {begin, end}) cudaEventDestroy(event);
        return double(milliseconds);
    };
    MatmulPlan &plan = dev.ctx->plan({A.type, B.type, cuda_type<Out>, A.op, B.op, m, n, k, A.ld, B.ld, ld, bias != nullptr,
                                      accumulate, matmul_aligned<X>({D, A.data, B.data, bias})},
                                     bias, try_one);
    point(plan);
    multiply(plan);
}

// In column-major terms x is (IC, T), w (IC, OC) and out (OC, T); the same holds for their gradients.
template <class X, class Out>
void matmul_product(Cuda<X> dev, Out *out, const X *x, const X *w, const X *bias, size_t T, size_t IC, size_t OC, size_t ld,
                    bool accumulate) {
    cublas_product(dev, out, ld, {w, CUBLAS_OP_T, IC}, {x, CUBLAS_OP_N, IC}, bias, OC, T, IC, accumulate);
}
template <class X>
void matmul_product_dx(Cuda<X> dev, X *dx, const X *dout, const X *w, size_t T, size_t IC, size_t OC, size_t ld,
                       bool accumulate) {
    const X *no_bias = nullptr;
    cublas_product(dev, dx, IC, {w, CUBLAS_OP_N, IC}, {dout, CUBLAS_OP_N, ld}, no_bias, IC, T, OC, accumulate);
}
template <class X>
void matmul_product_dw(Cuda<X> dev, float *dw, const X *dout, const X *x, size_t T, size_t IC, size_t OC, bool accumulate,
                       size_t ld) {
    const X *no_bias = nullptr;
    cublas_product(dev, dw, IC, {x, CUBLAS_OP_N, IC}, {dout, CUBLAS_OP_T, ld}, no_bias, IC, OC, T, accumulate);
}

#endif

// ---- the gradient of the bias -----------------------------------------------------------------------------------------------------

constexpr unsigned matmul_bias_warps = 32, matmul_bias_vectors = 2;

template <int N> struct MatmulBiasShared { float sum[matmul_bias_warps][matmul_bias_vectors][N]; };

// A block sums two vectors of columns, 32 bytes of each row, the size of a sector. So there are blocks for the whole GPU even with few columns.
// Neighbouring lanes take one column each, and 512 rows at a time. The kernel moves T * OC * sizeof(X) bytes.
template <class X, int N>
__global__ void __launch_bounds__(matmul_bias_warps * 32)
    matmul_bias_backward_kernel2(float *dbias, const X *dout, size_t T, size_t OC, size_t ld) {
    auto &s = shared_mem<MatmulBiasShared<N>>();
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, vector = lane % matmul_bias_vectors;
    const size_t o = (blockIdx.x * size_t(matmul_bias_vectors) + vector) * N;
    float sum[N] = {};
    if (o < OC)
#pragma unroll 8
        for (size_t t = threadIdx.x / matmul_bias_vectors; t < T; t += blockDim.x / matmul_bias_vectors) {
            const auto d = Vec<X, N>::load(dout + t * ld + o);
            for (int i = 0; i < N; i++) sum[i] += float(d[i]);
        }
    for (float &v : sum)
        for (unsigned distance = matmul_bias_vectors; distance < 32; distance *= 2) v += __shfl_xor_sync(all_lanes, v, distance);
    if (lane < matmul_bias_vectors)
        for (int i = 0; i < N; i++) s.sum[warp][vector][i] = sum[i];
    __syncthreads();
    if (threadIdx.x >= matmul_bias_vectors * N) return;
    const size_t column = blockIdx.x * size_t(matmul_bias_vectors * N) + threadIdx.x;
    if (column >= OC) return;
    float total = 0;
    for (auto &of_warp : s.sum) total += of_warp[threadIdx.x / N][threadIdx.x % N];
    dbias[column] += total;
}

template <class X> void matmul_bias_backward(Cuda<X> dev, float *dbias, const X *dout, size_t T, size_t OC, size_t ld) {
    constexpr int wide = Vec<X>::size;
    const auto run = [&](auto kernel, int N, size_t shared) {
        launch(dev, kernel, Grid{ceil_div(OC, size_t(matmul_bias_vectors) * N)}, matmul_bias_warps * 32, shared, dbias, dout, T,
               OC, ld);
    };
    if (OC % wide == 0 && fit_vectors<wide>(ld, dout))
        run(matmul_bias_backward_kernel2<X, wide>, wide, sizeof(MatmulBiasShared<wide>));
    else run(matmul_bias_backward_kernel2<X, 1>, 1, sizeof(MatmulBiasShared<1>));
}

// ---- launchers ----------------------------------------------------------------------------------------------------------------------

template <class X, class Out>  // Out: X, or float for logits, which have no bias
void matmul_forward(Cuda<X> dev, Out *out, const X *x, const X *w, const std::type_identity_t<X> *bias, size_t T, size_t IC,
                    size_t OC, size_t ld = 0, bool accumulate = false) {
    ld = ld ? ld : OC;
    in_parts(
        T, [&](size_t t, size_t n) { matmul_product(dev, out + t * ld, x + t * IC, w, bias, n, IC, OC, ld, accumulate); },
        matmul_run(dev));
}

template <class X>
void matmul_backward_input(Cuda<X> dev, X *dx, const X *dout, const X *w, size_t T, size_t IC, size_t OC, size_t ld = 0,
                           bool accumulate = false) {
    ld = ld ? ld : OC;
    in_parts(
        T, [&](size_t t, size_t n) { matmul_product_dx(dev, dx + t * IC, dout + t * ld, w, n, IC, OC, ld, accumulate); },
        matmul_run(dev));
}

template <class X>
void matmul_backward_weight(Cuda<X> dev, float *dw, float *dbias, const X *dout, const X *x, size_t T, size_t IC, size_t OC,
                            bool accumulate, size_t ld = 0) {
    ld = ld ? ld : OC;
    in_parts(
        T,
        [&](size_t t, size_t n) {
            matmul_product_dw(dev, dw, dout + t * ld, x + t * IC, n, IC, OC, accumulate || t > 0, ld);
            if (dbias) matmul_bias_backward(dev, dbias, dout + t * ld, n, OC, ld);
        },
        matmul_run(dev));
}
}  // namespace CUDA_BACKEND
