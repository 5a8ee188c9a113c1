// Runs a handwritten kernel in the PTX interpreter, with a prologue and an end that all tests share.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>

#include "../../dev/emulator/ptx/prediction.h"
#include "../../dev/emulator/ptx/tensor_map.h"
#include "../../llmc/core/dtype.h"
#include "../errors.h"

// A function that nvcc did not inline: declared before the kernel, defined after it.
inline constexpr const char *declaration = ".func (.param .b32 func_retval0) twice (.param .b32 twice_param_0);";
inline constexpr const char *definition = R"(
    .func (.param .b32 func_retval0) twice(.param .b32 twice_param_0)
    {
    .reg .pred %p<2>; .reg .b32 %r<9>;
    ld.param.u32 %r1, [twice_param_0];
    setp.gt.u32 %p1, %r1, 1000;
    @%p1 bra LARGE;
    add.s32 %r2, %r1, %r1;
    st.param.b32 [func_retval0+0], %r2;
    ret;
    LARGE: st.param.b32 [func_retval0+0], 7;
    ret;
    }
)";

// The kernel's arguments: x holds operands, y receives results, and `maps` describes arrays in x.
constexpr size_t words = 16384;
alignas(1024) inline uint32_t x[words], y[words];
alignas(64) inline ptx::TensorMap maps[4];

// Registers: %r0 thread, %r1 block, %r2 shared memory of the block, %r3 own word of shared memory, %r9 zero, %p0 true in thread 0;
// %rd0 x, %rd1 y, %rd4 maps, %rd2 own word of x (number %r0), %rd3 own word of y (by the thread's number in the grid).
inline constexpr const char *entry = R"(
    .extern .shared .align 1024 .b8 buffer[];
    .visible .entry kernel(.param .u64 kernel_param_0, .param .u64 .ptr .global .align 1 kernel_param_1, .param .u64 kernel_param_2)
)";
inline constexpr const char *prologue = R"({
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .f32 %f<200>; .reg .f64 %fd<9>; .reg .b64 %rd<99>;
    ld.param.u64 %rd0, [kernel_param_0];  ld.param.u64 %rd1, [kernel_param_1];  ld.param.u64 %rd4, [kernel_param_2];
    mov.u32 %r0, %tid.x;  mov.u32 %r1, %ctaid.x;  mov.u32 %r2, buffer;  mov.u32 %r9, 0;  setp.eq.u32 %p0, %r0, 0;
    mov.u32 %r4, %ntid.x;  mad.lo.u32 %r4, %r1, %r4, %r0;  mul.wide.u32 %rd3, %r4, 4;  add.s64 %rd3, %rd1, %rd3;
    mul.wide.u32 %rd2, %r0, 4;  add.s64 %rd2, %rd0, %rd2;  shl.b32 %r3, %r0, 2;  add.s32 %r3, %r3, %r2;
)";

struct Result {
    ptx::Counts counts;
    std::array<ptx::Count, ptx::pipes> by_pipe;
};

// Results are in y. `variables` are the module's, with its target; `directives` are the kernel's.
inline Result launch(const std::string &body, const ptx::Launch &how, const std::string &variables = "",
                     const std::string &directives = "") {
    ptx::Module module(declaration + (variables + entry + directives + prologue + body) + "\nret;\n}\n" + definition);
    std::fill(y, y + words, 0);
    uint32_t *const px = x, *const py = y;
    ptx::TensorMap *const pm = maps;
    ptx::DeviceMemory memory;
    memory.add(px, sizeof x), memory.add(py, sizeof y), memory.add(pm, sizeof maps);
    Result result;
    result.counts = ptx::run(module.kernel("kernel"), how, {&px, &py, &pm}, memory);
    result.by_pipe = result.counts.by_pipe(module.kernel("kernel"));
    return result;
}
inline Result run(const std::string &body, unsigned threads = 32, unsigned blocks = 1) {
    for (uint32_t i = 0; i < words; i++) x[i] = i;
    return launch(body, {{blocks}, {threads}, 16384, true});
}

// The launch's error contains `words`; it is "no error" if there was none.
inline void expect_error(const std::string &body, const std::string &words, const ptx::Launch &how,
                         const std::string &variables = "") {
    SCOPED_TRACE(body);
    expect_contains(error_of([&] { launch(body, how, variables); }), {words});
}
inline void expect_error(const std::string &body, const std::string &words, unsigned threads = 32) {
    expect_error(body, words, {{}, {threads}, 16384, true});
}
