// cuBLASLt's products, computed on the host: only the calls of llmc/ops/matmul.cuh, and the cuBLAS call of dev/cuda/matmul.cu. Sums are double and
// are rounded once. Each call is checked against the rules of the manual ("Using the cuBLASLt API"), and each product is recorded.
#include <cublasLt.h>
#include <cublas_v2.h>

#include <mutex>
#include <vector>

#include "../../../llmc/core/dtype.h"
#include "../../../llmc/ops/fp8.h"
#include "runtime.h"

namespace ptx {
std::vector<Product> products;
int heuristics = 0, heuristic_state = CUBLAS_STATUS_SUCCESS;
int candidates = 1, fastest = 0;
double seconds = 0;
}  // namespace ptx

namespace {

struct Description {
    cublasOperation_t a = CUBLAS_OP_N, b = CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void *bias = nullptr;
    cudaDataType_t bias_type = CUDA_R_32F;
    const float *a_scale = nullptr, *b_scale = nullptr;
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t reductions = 0, a = 256, b = 256, c = 256, d = 256;  // 256: the manual's default
};
struct Matrix {  // column-major
    cudaDataType_t type;
    size_t rows, columns;
    int64_t ld;
    bool operator==(const Matrix &) const = default;
};

// The handles point to structures that cuBLASLt does not declare.
Description &of(cublasLtMatmulDesc_t d) { return *reinterpret_cast<Description *>(d); }
Matrix &of(cublasLtMatrixLayout_t m) { return *reinterpret_cast<Matrix *>(m); }
Preference &of(cublasLtMatmulPreference_t p) { return *reinterpret_cast<Preference *>(p); }

bool is_fp8(cudaDataType_t type) { return type == CUDA_R_8F_E4M3; }
size_t element_bytes(cudaDataType_t type) { return is_fp8(type) ? 1 : type == CUDA_R_16BF ? sizeof(bf16) : sizeof(float); }

// The product for which an algorithm was chosen. The algorithm may only be used for this product, and only if the state was SUCCESS.
struct Algorithm {
    Preference preference;
    Matrix a, b, d;
    size_t bias_alignment;
    int number;
};
const Algorithm *algorithm_of(const cublasLtMatmulAlgo_t &algo) { return reinterpret_cast<const Algorithm *>(algo.data[0]); }

size_t alignment_of(const void *p) {
    size_t alignment = 256;
    while (uintptr_t(p) % alignment) alignment /= 2;
    return alignment;
}

void rule(bool holds, const char *what) {
    if (!holds) die("cuBLASLt's rule: %s", what);
}

float element(const void *p, cudaDataType_t type, size_t n) {
    if (is_fp8(type)) return fp8_number(static_cast<const uint8_t *>(p)[n]);
    return type == CUDA_R_16BF ? float(static_cast<const bf16 *>(p)[n]) : static_cast<const float *>(p)[n];
}
std::vector<float> read(const void *p, const Matrix &m, bool transposed) {  // returns op(M), (rows, columns), row by row
    const size_t rows = transposed ? m.columns : m.rows, columns = transposed ? m.rows : m.columns;
    std::vector<float> out(rows * columns);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++)
            out[r * columns + c] = element(p, m.type, transposed ? r * size_t(m.ld) + c : c * size_t(m.ld) + r);
    return out;
}

double dot(const float *x, const float *y, size_t n) {
    double sum = 0;
    for (size_t k = 0; k < n; k++) sum += double(x[k]) * double(y[k]);
    return sum;
}
void store(void *p, cudaDataType_t type, size_t n, double value) {
    if (type == CUDA_R_16BF) static_cast<bf16 *>(p)[n] = bf16(float(value));
    else static_cast<float *>(p)[n] = float(value);
}
}  // namespace

extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return *handle = nullptr, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
const char *cublasLtGetStatusString(cublasStatus_t status) { return status ? "not supported" : "success"; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t, cudaDataType_t) {
    return *d = reinterpret_cast<cublasLtMatmulDesc_t>(new Description), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return delete &of(d), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t attribute, const void *value,
                                              size_t bytes) {
    const auto set = [&](auto &field) {
        if (bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
        return memcpy(&field, value, bytes), CUBLAS_STATUS_SUCCESS;
    };
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSA) return set(of(d).a);
    if (attribute == CUBLASLT_MATMUL_DESC_TRANSB) return set(of(d).b);
    if (attribute == CUBLASLT_MATMUL_DESC_EPILOGUE) return set(of(d).epilogue);
    if (attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER) return set(of(d).bias);
    if (attribute == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE) return set(of(d).bias_type);
    if (attribute == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) return set(of(d).a_scale);
    if (attribute == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER) return set(of(d).b_scale);
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *m, cudaDataType_t type, uint64_t rows, uint64_t columns,
                                          int64_t ld) {
    return *m = reinterpret_cast<cublasLtMatrixLayout_t>(new Matrix{type, rows, columns, ld}), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t m) { return delete &of(m), CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
    return *p = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return delete &of(p), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes) {
    const auto set = [&](auto &field) {
        if (bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
        return memcpy(&field, value, bytes), CUBLAS_STATUS_SUCCESS;
    };
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) return set(of(p).workspace);
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) return set(of(p).reductions);
    if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES) return set(of(p).a);
    if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES) return set(of(p).b);
    if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES) return set(of(p).c);
    if (attribute == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES) return set(of(p).d);
    return CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t *found, int *count) {
    ptx::heuristics++;
    rule(of(preference).reductions == (CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE),
         "sums that are split by atomics have other bits every time");
    *count = std::min(most, ptx::candidates);
    for (int i = 0; i < *count; i++) {
        found[i] = {};
        found[i].state = cublasStatus_t(ptx::heuristic_state);
        // Kept until the program ends, because the API has no call that releases an algorithm.
        const auto *const chosen =
            found[i].state ? nullptr : new Algorithm{of(preference), of(a), of(b), of(d), alignment_of(of(product).bias), i};
        found[i].algo.data[0] = reinterpret_cast<uint64_t>(chosen);
        found[i].workspaceSize = of(preference).workspace;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *algorithm,
                                       cublasLtMatmulHeuristicResult_t *result) {
    *result = {};
    return algorithm_of(*algorithm) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

// D = alpha op(A) op(B) + beta C + bias
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void *alpha, const void *A,
                              cublasLtMatrixLayout_t a_layout, const void *B, cublasLtMatrixLayout_t b_layout, const void *beta,
                              const void *C, cublasLtMatrixLayout_t c_layout, void *D, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes, cudaStream_t) {
    const Description &p = of(product);
    const Matrix &a = of(a_layout), &b = of(b_layout), &c = of(c_layout), &d = of(d_layout);
    const size_t K = p.a == CUBLAS_OP_N ? a.columns : a.rows;
    const Algorithm *const chosen = algorithm_of(*algorithm);
    rule(chosen, "an algorithm is valid only if its state is SUCCESS");
    rule(chosen->a == a && chosen->b == b && chosen->d == d, "an algorithm is for the layouts that it was chosen for");
    const Preference &told = chosen->preference;
    rule(alignment_of(A) >= told.a && alignment_of(B) >= told.b && alignment_of(C) >= told.c && alignment_of(D) >= told.d,
         "pointers are aligned as it was told");
    rule(alignment_of(p.bias) >= std::min<size_t>(chosen->bias_alignment, told.d), "the bias is aligned as it was told");
    rule(a.ld >= int64_t(a.rows) && b.ld >= int64_t(b.rows) && d.ld >= int64_t(d.rows),
         "a column begins behind the one before it");
    rule(uintptr_t(workspace) % 256 == 0, "the workspace is aligned to 256 bytes");
    rule(workspace_bytes >= told.workspace && ptx::allocated(workspace, workspace_bytes), "the workspace is allocated");
    if (is_fp8(a.type) || is_fp8(b.type)) {
        rule(is_fp8(a.type) && is_fp8(b.type), "operands in FP8 come in pairs");
        rule(p.a == CUBLAS_OP_T && p.b == CUBLAS_OP_N, "operands in FP8 are multiplied along their columns");
        rule(d.rows % 16 == 0 && d.columns % 16 == 0 && K % 16 == 0 && told.a >= 16 && told.b >= 16 && told.d >= 16,
             "sizes in FP8 are multiples of 16, and pointers aligned to 16 bytes");
        rule(p.epilogue != CUBLASLT_EPILOGUE_BIAS || p.bias_type == CUDA_R_16BF, "the bias of a product in FP8 is bf16");
        rule(p.a_scale && p.b_scale, "operands in FP8 have scales");
    }
    {
        static std::mutex lock;  // ranks are threads
        const std::lock_guard guard(lock);
        ptx::products.push_back({d.rows, d.columns, K, size_t(a.ld), size_t(b.ld), size_t(d.ld), element_bytes(a.type),
                                 element_bytes(d.type), told.d, A, B, D, workspace, chosen->number});
        ptx::seconds += chosen->number == ptx::fastest ? 0 : 1;
    }
    const std::vector<float> rows = read(A, a, p.a == CUBLAS_OP_T), columns = read(B, b, p.b == CUBLAS_OP_N);
    const double of_operands = is_fp8(a.type) ? double(*p.a_scale) * double(*p.b_scale) : 1;
    const double scale = double(*static_cast<const float *>(alpha)) * of_operands,
                 keep = double(*static_cast<const float *>(beta));
    for (size_t m = 0; m < d.rows; m++)
        for (size_t n = 0; n < d.columns; n++) {
            double sum = scale * dot(&rows[m * K], &columns[n * K], K);
            if (keep != 0) sum += keep * double(element(C, c.type, n * size_t(c.ld) + m));
            if (p.epilogue == CUBLASLT_EPILOGUE_BIAS) sum += double(element(p.bias, p.bias_type, m));
            store(D, d.type, n * size_t(d.ld) + m, sum);
        }
    return CUBLAS_STATUS_SUCCESS;
}

// D = op(A) op(B)
cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                            const void *alpha, const void *A, cudaDataType a_type, int a_ld, const void *B, cudaDataType b_type,
                            int b_ld, const void *beta, void *D, cudaDataType d_type, int d_ld, cublasComputeType_t,
                            cublasGemmAlgo_t) {
    if (*static_cast<const float *>(alpha) != 1 || *static_cast<const float *>(beta) != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    const auto matrix = [](cudaDataType type, int rows, int columns, int ld, bool turned) {
        return Matrix{type, size_t(turned ? columns : rows), size_t(turned ? rows : columns), ld};
    };
    const std::vector<float> rows = read(A, matrix(a_type, m, k, a_ld, op_a == CUBLAS_OP_T), op_a == CUBLAS_OP_T),
                             columns = read(B, matrix(b_type, k, n, b_ld, op_b == CUBLAS_OP_T), op_b == CUBLAS_OP_N);
    for (size_t c = 0; c < size_t(n); c++)
        for (size_t r = 0; r < size_t(m); r++)
            store(D, d_type, c * size_t(d_ld) + r, dot(&rows[r * size_t(k)], &columns[c * size_t(k)], size_t(k)));
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) { return *handle = nullptr, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
const char *cublasGetStatusString(cublasStatus_t status) { return status ? "not supported" : "success"; }
}
