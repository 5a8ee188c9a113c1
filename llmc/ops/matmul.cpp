#include "matmul.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "../core/common.h"
#include "amx_gemm.h"
#include "few_tokens.h"
#include "grouped_matmul.h"
#include "micro_kernel.h"
#include "sgemm.h"

#if defined(LLMC_ONEDNN)
#include <dnnl.hpp>
#elif defined(LLMC_OPENBLAS)
#include <cblas.h>
#endif

const char *matmul_backend() {
#if defined(LLMC_ONEDNN)
    return "oneDNN";
#elif defined(LLMC_OPENBLAS)
    return "OpenBLAS";
#else
    return "own sgemm";
#endif
}

// Divides n into lengths, for tiles of C. Our own threads compute tiles by single-threaded calls of the library. With its own threads oneDNN would
// divide a long sum among them (dw, for a long T), and results would depend on their number; OpenBLAS's threads would compete with OpenMP's for the
// cores. Lengths depend on n alone. All but the last are multiples of 64.
struct Tiling {
    size_t n, step;
    Tiling(size_t n, size_t longest) : n(n), step(round_up(ceil_div(n, ceil_div(n, longest)), 64)) {}
    size_t count() const { return std::max<size_t>(1, ceil_div(n - 1, step)); }  // a last tile of length 1 joins the one before
    size_t length(size_t i) const { return i + 1 < count() ? step : n - i * step; }
};

// The rows of A and the columns of B are packed for each tile, so large tiles cost less packing; but each thread should have several tiles.
// A is packed only once if tiles are as wide as C. oneDNN packs no floats if neither factor is transposed.
struct Tiles {
    Tiling rows, columns;
    template <class X> Tiles(size_t M, size_t N, Matrix<X> A, Matrix<X> B) : rows(M, 512), columns(N, 512) {
        const bool in_place = sizeof(X) == sizeof(float) && A.column == 1 && B.column == 1;
        if (N <= 1024 && !in_place) rows = Tiling(M, 256), columns = Tiling(N, 1024);
        if (rows.count() * columns.count() < 6) rows = Tiling(M, 256), columns = Tiling(N, 512);
    }
};

// ---- cached state -------------------------------------------------------------------------------------------------------------

#ifdef LLMC_ONEDNN
using dnnl::memory;
template <class X> constexpr memory::data_type onednn_type = sizeof(X) == 2 ? memory::data_type::bf16 : memory::data_type::f32;

struct Shape {  // of the product of one tile
    memory::data_type x, out;
    memory::dim M, N, K, a_row, a_column, b_row, b_column, c_row;
    bool bias, accumulate;
    auto operator<=>(const Shape &) const = default;
};
struct Primitive {
    dnnl::matmul matmul;
    memory::desc a, b, bias, c, scratchpad;
};

// Creates the product of matrices with these descriptions: A, B, optionally a bias, C. oneDNN 2 needs an additional desc object.
template <class... Matrices>
static dnnl::matmul::primitive_desc describe(const dnnl::engine &engine, const dnnl::primitive_attr &attributes,
                                             const Matrices &...matrices) {
#if DNNL_VERSION_MAJOR < 3
    return {dnnl::matmul::desc(matrices...), attributes, engine};
#else
    return {engine, matrices..., attributes};
#endif
}
#endif

struct Context {
    // The memory from matmul_use_scratch. `own` replaces it for callers without scratch, such as tests, and for products that need more:
    // oneDNN reports a product's scratch size only after creating the product.
    std::span<char> planned;
    struct Free {
        void operator()(char *p) const { free(p); }
    };
    std::unique_ptr<char, Free> own;
    size_t own_bytes = 0;

    // Returns memory that is aligned to 4096 bytes.
    void *scratch_for(size_t bytes) {
        if (bytes <= planned.size()) return planned.data();
        if (bytes > own_bytes) {
            own.reset();
            own.reset(static_cast<char *>(aligned_alloc(4096, round_up(bytes, 4096))));
            if (!own) die("no memory for %zu bytes of matmul's scratch\n  fix: use fewer --threads", bytes);
            own_bytes = bytes;
        }
        return own.get();
    }

#ifdef LLMC_ONEDNN
    dnnl::engine engine{dnnl::engine::kind::cpu, 0};

    // oneDNN compiles a product on creation, which takes 0.05 to 0.5 ms (measured), so all products are cached. Because rows are multiples of 64 and
    // tiles are small, a model needs two or three hundred products for rows of any length. The limit is for shapes that never repeat.
    static constexpr size_t most_products = 512;
    std::map<Shape, Primitive> products;
    const Primitive &product(const Shape &shape);
#endif
};

ContextPtr make_context() {
#if defined(LLMC_OPENBLAS)
    openblas_set_num_threads(1);
#endif
    return ContextPtr(new Context);
}
void ContextDeleter::operator()(Context *ctx) const { delete ctx; }

// ---- C = A B + bias or C += A B, C (M, N) row-major -------------------------------------------------------------------------

#if defined(LLMC_ONEDNN)

const Primitive &Context::product(const Shape &s) {
    if (const auto found = products.find(s); found != products.end()) return found->second;
    Primitive p;
    p.a = memory::desc({s.M, s.K}, s.x, memory::dims{s.a_row, s.a_column});
    p.b = memory::desc({s.K, s.N}, s.x, memory::dims{s.b_row, s.b_column});
    p.c = memory::desc({s.M, s.N}, s.out, memory::dims{s.c_row, 1});
    if (s.bias) p.bias = memory::desc({1, s.N}, s.x, memory::dims{s.N, 1});
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (s.accumulate) {
        dnnl::post_ops sum;
        sum.append_sum(1.0f);
        attributes.set_post_ops(sum);
    }
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);  // a product is compiled for this number of threads
    try {
        const auto made =
            s.bias ? describe(engine, attributes, p.a, p.b, p.bias, p.c) : describe(engine, attributes, p.a, p.b, p.c);
        p.scratchpad = made.scratchpad_desc();
        p.matmul = dnnl::matmul(made);
    } catch (const dnnl::error &e) {
        omp_set_num_threads(threads);
        die("oneDNN cannot multiply (%zu, %zu) by (%zu, %zu): %s", size_t(s.M), size_t(s.K), size_t(s.K), size_t(s.N), e.what());
    }
    omp_set_num_threads(threads);
    return products.emplace(s, std::move(p)).first->second;
}

// Long sums over tokens, such as A^T B in a weight's gradient, are also divided. Otherwise each T would need its own products.
template <class X, class Out>
static void onednn_gemm(Cpu<X> dev, Out *C, size_t ld, Matrix<X> A, Matrix<X> B, const X *bias, size_t M, size_t N, size_t K,
                        bool accumulate) {
    Context &ctx = *dev.ctx;
    const Tiles tiles(M, N, A, B);
    const bool over_tokens = A.row == 1;
    const Tiling &rows = tiles.rows, &columns = tiles.columns, depth(K, over_tokens ? 1024 : K);
    if (ctx.products.size() + 12 > Context::most_products) ctx.products.clear();
    // Only the last tiles and the last part of a sum differ in size, and only the first part may overwrite C: [row][column][part]
    const Primitive *products[2][2][3];
    const auto product_of = [&](size_t i, size_t j, size_t k) -> const Primitive *& {
        return products[i + 1 == rows.count()][j + 1 == columns.count()][k == 0 ? 0 : k + 1 == depth.count() ? 2 : 1];
    };
    size_t scratchpad = 0;
    for (size_t i : {size_t(0), rows.count() - 1})
        for (size_t j : {size_t(0), columns.count() - 1})
            for (size_t k : {size_t(0), std::min<size_t>(1, depth.count() - 1), depth.count() - 1}) {
                const Primitive &p =
                    ctx.product({onednn_type<X>, onednn_type<Out>, memory::dim(rows.length(i)), memory::dim(columns.length(j)),
                                 memory::dim(depth.length(k)), memory::dim(A.row), memory::dim(A.column), memory::dim(B.row),
                                 memory::dim(B.column), memory::dim(ld), bias != nullptr, accumulate || k > 0});
                product_of(i, j, k) = &p;
                scratchpad = std::max(scratchpad, round_up(p.scratchpad.get_size(), 4096));
            }
    char *scratch = static_cast<char *>(ctx.scratch_for(size_t(dev.threads) * scratchpad));
#pragma omp parallel num_threads(dev.threads)
    {
        omp_set_num_threads(1);  // oneDNN's threads, in this thread and until the end of the region
        dnnl::stream stream(ctx.engine);
        char *own_scratch = scratch + size_t(omp_get_thread_num()) * scratchpad;
        const auto view = [&](const memory::desc &desc, const void *data) {
            return memory(desc, ctx.engine, const_cast<void *>(data));
        };
#pragma omp for collapse(2) schedule(dynamic)
        for (size_t j = 0; j < columns.count(); j++)
            for (size_t i = 0; i < rows.count(); i++)
                for (size_t k = 0; k < depth.count(); k++) {
                    const Primitive &p = *product_of(i, j, k);
                    const size_t i0 = i * rows.step, j0 = j * columns.step, k0 = k * depth.step;
                    std::unordered_map<int, memory> arguments{{DNNL_ARG_SRC, view(p.a, A.data + i0 * A.row + k0 * A.column)},
                                                              {DNNL_ARG_WEIGHTS, view(p.b, B.data + k0 * B.row + j0 * B.column)},
                                                              {DNNL_ARG_DST, view(p.c, C + i0 * ld + j0)},
                                                              {DNNL_ARG_SCRATCHPAD, view(p.scratchpad, own_scratch)}};
                    if (bias) arguments[DNNL_ARG_BIAS] = view(p.bias, bias + j0);
                    p.matmul.execute(stream, arguments);
                }
    }
}

#elif defined(LLMC_OPENBLAS)

static void openblas_gemm(CpuF32 dev, float *C, size_t ld, Matrix<float> A, Matrix<float> B, const float *bias, size_t M,
                          size_t N, size_t K, bool accumulate) {
    const Tiles tiles(M, N, A, B);
    const Tiling &rows = tiles.rows, &columns = tiles.columns;
#pragma omp parallel for num_threads(dev.threads) collapse(2) schedule(dynamic)
    for (size_t j = 0; j < columns.count(); j++)
        for (size_t i = 0; i < rows.count(); i++) {
            const size_t i0 = i * rows.step, j0 = j * columns.step, m = rows.length(i), n = columns.length(j);
            float *tile = C + i0 * ld + j0;
            if (bias)
                for (size_t r = 0; r < m; r++) std::copy_n(bias + j0, n, tile + r * ld);
            // One of the strides is 1. If both are, a side has length 1, and the step, though not used, must still be legal.
            const size_t a_step = A.column == 1 ? std::max(A.row, K) : A.column,
                         b_step = B.column == 1 ? std::max(B.row, n) : B.column;
            cblas_sgemm(CblasRowMajor, A.column == 1 ? CblasNoTrans : CblasTrans, B.column == 1 ? CblasNoTrans : CblasTrans,
                        int(m), int(n), int(K), 1.0f, A.data + i0 * A.row, int(a_step), B.data + j0 * B.column, int(b_step),
                        bias || accumulate ? 1.0f : 0.0f, tile, int(ld));
        }
}

#endif

constexpr size_t page = 4096;

// Per thread, sgemm needs 1 MiB, and oneDNN a page more, for the sums of a bf16 tile (measured).
template <class X> size_t matmul_scratch(Cpu<X> dev) {
    size_t bytes = size_t(dev.threads) * (sgemm_scratch * sizeof(float) + page);
#ifdef LLMC_AMX
    if (sizeof(X) == 2 && amx::available()) bytes = std::max(bytes, amx_gemm_scratch(dev.threads));
#endif
    return bytes + page;
}

template <class X> void matmul_use_scratch(Cpu<X> dev, void *scratch) {
    char *const aligned = reinterpret_cast<char *>(round_up(reinterpret_cast<uintptr_t>(scratch), page));
    dev.ctx->planned = scratch ? std::span(aligned, matmul_scratch(dev) - page) : std::span<char>();
}

// True if products of X run on the CPU's matrix unit.
template <class X> static bool on_matrix_unit() {
#ifdef LLMC_AMX
    return sizeof(X) == 2 && amx::available();
#else
    return false;
#endif
}

// Computes products without a library, because libraries compile kernels for sizes that repeat.
template <class X, class Out> static void own_products(Cpu<X> dev, std::span<const Product<X, Out>> products) {
    void *const scratch = dev.ctx->scratch_for(matmul_scratch(dev));
#ifdef LLMC_AMX
    if constexpr (sizeof(X) == 2)
        if (amx::available()) return amx_gemm(dev.threads, scratch, products);
#endif
    sgemm(dev.threads, static_cast<float *>(scratch), products);
}

template <class X, class Out>
static void gemm(Cpu<X> dev, Out *C, size_t ld, Matrix<X> A, Matrix<X> B, const X *bias, size_t M, size_t N, size_t K,
                 bool accumulate) {
    const Product<X, Out> product{C, ld, A, B, bias, M, N, K, accumulate};
    if (on_matrix_unit<X>()) return own_products<X, Out>(dev, {&product, 1});
#if defined(LLMC_ONEDNN)
    // oneDNN ignores the strides of a transposed A with one row (3.7.1, 3.8.1; 3.9.1 in bf16), and of C with one column (3.7.1). 3.11.2 is right.
    if (M > 1 && N > 1 && (sizeof(X) == sizeof(float) || simd::bf16_dot_is_fast()))
        return onednn_gemm(dev, C, ld, A, B, bias, M, N, K, accumulate);
#elif defined(LLMC_OPENBLAS)
    if constexpr (sizeof(X) == sizeof(float)) return openblas_gemm(dev, C, ld, A, B, bias, M, N, K, accumulate);
#endif
    own_products<X, Out>(dev, {&product, 1});
}

// ---- the three products of a linear layer -----------------------------------------------------------------------------------

// The product for few tokens on CPUs without a matrix unit (few_tokens.h). Returns false if it has too many tokens.
template <class Kind, class X, class Out> static bool few_tokens_forward(Cpu<X> dev, const Product<X, Out> &p) {
    if (!few_tokens::takes<Kind>(p.M, p.K)) return false;
    if (!dev.exact && few_tokens::dots<Kind>(dev.threads, p)) return true;
    const size_t scratch = matmul_scratch(dev), at_once = scratch / few_tokens::scratch<Kind>(1, p.K) * simd::lanes;
    if (at_once == 0) return false;
    in_parts(
        p.M,
        [&](size_t t, size_t n) {
            Product<X, Out> part = p;
            part.C += t * p.ld, part.A.data += t * p.K, part.M = n;
            few_tokens::panels<Kind>(dev.threads, static_cast<float *>(dev.ctx->scratch_for(scratch)), part);
        },
        at_once);
    return true;
}
template <class X, class Out> static bool few_tokens_forward(Cpu<X> dev, const Product<X, Out> &p) {
#ifdef __AVX512BF16__
    if constexpr (sizeof(X) == 2)
        if (simd::bf16_dot_is_fast()) return few_tokens_forward<few_tokens::AsPairs>(dev, p);
#endif
    return few_tokens_forward<few_tokens::AsFloats<X>>(dev, p);
}

// Handles at most one run of tokens.
template <class X, class Out>
static void forward_run(Cpu<X> dev, Out *out, const X *x, const X *w, const X *bias, size_t T, size_t IC, size_t OC, size_t ld,
                        bool accumulate) {
    const Product<X, Out> product{out, ld, {x, IC, 1}, {w, 1, IC}, bias, T, OC, IC, accumulate};
    if (!on_matrix_unit<X>() && few_tokens_forward(dev, product)) return;
    if (dev.exact) own_products<X, Out>(dev, {&product, 1});
    else gemm<X, Out>(dev, out, ld, product.A, product.B, bias, T, OC, IC, accumulate);
}

template <class X, class Out>
void matmul_forward(Cpu<X> dev, Out *out, const X *x, const X *w, const std::type_identity_t<X> *bias, size_t T, size_t IC,
                    size_t OC, size_t ld, bool accumulate) {
    ld = ld ? ld : OC;
    in_parts(
        T, [&](size_t t, size_t n) { forward_run<X, Out>(dev, out + t * ld, x + t * IC, w, bias, n, IC, OC, ld, accumulate); },
        matmul_run(dev));
}

template <class X>
void matmul_backward_input(Cpu<X> dev, X *dx, const X *dout, const X *w, size_t T, size_t IC, size_t OC, size_t ld,
                           bool accumulate) {
    ld = ld ? ld : OC;
    in_parts(
        T,
        [&](size_t t, size_t n) {
            gemm<X, X>(dev, dx + t * IC, IC, {dout + t * ld, ld, 1}, {w, IC, 1}, nullptr, n, IC, OC, accumulate);
        },
        matmul_run(dev));
}

template <class X>
void matmul_backward_weight(Cpu<X> dev, float *dw, float *dbias, const X *dout, const X *x, size_t T, size_t IC, size_t OC,
                            bool accumulate, size_t ld) {
    ld = ld ? ld : OC;
    in_parts(
        T,
        [&](size_t t, size_t n) {
            gemm<X, float>(dev, dw, IC, {dout + t * ld, 1, ld}, {x + t * IC, IC, 1}, nullptr, OC, IC, n, accumulate || t > 0);
        },
        matmul_run(dev));
    if (dbias) matmul_bias_backward(dev, dbias, dout, T, OC, ld);
}

template <class X> void matmul_bias_backward(Cpu<X> dev, float *dbias, const X *dout, size_t T, size_t OC, size_t ld) {
    constexpr size_t width = 64, run = 256;  // columns of a task; tokens of a partial sum
#pragma omp parallel for num_threads(dev.threads)
    for (size_t o0 = 0; o0 < OC; o0 += width)
        for (size_t t0 = 0; t0 < T; t0 += run) {
            const size_t n = std::min(width, OC - o0);
            float sum[width] = {};
            for (size_t t = t0; t < std::min(T, t0 + run); t++)
                for (size_t o = 0; o < n; o++) sum[o] += float(dout[t * ld + o0 + o]);
            for (size_t o = 0; o < n; o++) dbias[o0 + o] += sum[o];
        }
}

// ---- products of groups -----------------------------------------------------------------------------------------------------

// Calls f(e, first row, rows) for each group.
template <class F> static void for_groups(RowGroups groups, F f) {
    const int32_t *starts = groups.starts;
    for (size_t e = 0; e < groups.E; e++) f(e, size_t(starts[e]), size_t(starts[e + 1] - starts[e]));
}

// If groups have few rows on average, as in generation, packing a matrix takes longer than multiplying it, so the matrix is read in place, for as many
// rows at a time as do not decide on their bits. R decides, so a row's bits do not depend on other rows. For 1 and 8 rows per group this takes a fifth and
// a half of the time in bf16, and for 1 row a fifth in float (measured, EPYC).
template <class X>
void grouped_matmul_forward(Cpu<X> dev, X *out, const X *x, const X *w, RowGroups groups, size_t IC, size_t OC, size_t ld,
                            bool accumulate) {
    if (ld == 0) ld = OC;
    std::vector<Product<X, X>> products;
    constexpr size_t at_once = few_tokens::most_of_dots;
    const bool few = !on_matrix_unit<X>() && groups.R <= at_once * std::max<size_t>(2, groups.E);
    for_groups(groups, [&](size_t e, size_t r, size_t n) {
        X *const out_e = out + r * ld;
        const X *const x_e = x + r * IC, *const w_e = w + e * OC * IC;
        if (!few) return products.push_back({out_e, ld, {x_e, IC, 1}, {w_e, 1, IC}, nullptr, n, OC, IC, accumulate});
        in_parts(
            n,
            [&](size_t i, size_t m) {
                forward_run<X, X>(dev, out_e + i * ld, x_e + i * IC, w_e, nullptr, m, IC, OC, ld, accumulate);
            },
            at_once);
    });
    own_products<X, X>(dev, products);
}

template <class X>
void grouped_matmul_backward_input(Cpu<X> dev, X *dx, const X *dout, const X *w, RowGroups groups, size_t IC, size_t OC,
                                   size_t ld, bool accumulate) {
    if (ld == 0) ld = OC;
    std::vector<Product<X, X>> products;
    for_groups(groups, [&](size_t e, size_t r, size_t n) {
        products.push_back({dx + r * IC, IC, {dout + r * ld, ld, 1}, {w + e * OC * IC, IC, 1}, nullptr, n, IC, OC, accumulate});
    });
    own_products<X, X>(dev, products);
}

template <class X>
void grouped_matmul_backward_weight(Cpu<X> dev, float *dw, const X *dout, const X *x, RowGroups groups, size_t IC, size_t OC,
                                    bool accumulate, size_t ld) {
    if (ld == 0) ld = OC;
    std::vector<Product<X, float>> products;
    for_groups(groups, [&](size_t e, size_t r, size_t n) {
        products.push_back({dw + e * OC * IC, IC, {dout + r * ld, 1, ld}, {x + r * IC, IC, 1}, nullptr, OC, IC, n, accumulate});
    });
    own_products<X, float>(dev, products);
}

template void grouped_matmul_forward(CpuF32, float *, const float *, const float *, RowGroups, size_t, size_t, size_t, bool);
template void grouped_matmul_forward(CpuBf16, bf16 *, const bf16 *, const bf16 *, RowGroups, size_t, size_t, size_t, bool);
template void grouped_matmul_backward_input(CpuF32, float *, const float *, const float *, RowGroups, size_t, size_t, size_t,
                                            bool);
template void grouped_matmul_backward_input(CpuBf16, bf16 *, const bf16 *, const bf16 *, RowGroups, size_t, size_t, size_t, bool);
template void grouped_matmul_backward_weight(CpuF32, float *, const float *, const float *, RowGroups, size_t, size_t, bool,
                                             size_t);
template void grouped_matmul_backward_weight(CpuBf16, float *, const bf16 *, const bf16 *, RowGroups, size_t, size_t, bool,
                                             size_t);
template void matmul_forward(CpuF32, float *, const float *, const float *, const float *, size_t, size_t, size_t, size_t, bool);
template void matmul_forward(CpuBf16, bf16 *, const bf16 *, const bf16 *, const bf16 *, size_t, size_t, size_t, size_t, bool);
template void matmul_forward(CpuBf16, float *, const bf16 *, const bf16 *, const bf16 *, size_t, size_t, size_t, size_t, bool);
template void matmul_backward_input(CpuF32, float *, const float *, const float *, size_t, size_t, size_t, size_t, bool);
template void matmul_backward_input(CpuBf16, bf16 *, const bf16 *, const bf16 *, size_t, size_t, size_t, size_t, bool);
template void matmul_backward_weight(CpuF32, float *, float *, const float *, const float *, size_t, size_t, size_t, bool,
                                     size_t);
template void matmul_backward_weight(CpuBf16, float *, float *, const bf16 *, const bf16 *, size_t, size_t, size_t, bool, size_t);
template void matmul_bias_backward(CpuF32, float *, const float *, size_t, size_t, size_t);
template void matmul_bias_backward(CpuBf16, float *, const bf16 *, size_t, size_t, size_t);
template size_t matmul_scratch(CpuF32);
template size_t matmul_scratch(CpuBf16);
template void matmul_use_scratch(CpuF32, void *);
template void matmul_use_scratch(CpuBf16, void *);
