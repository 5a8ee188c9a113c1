// Runs a kernel written by hand in the PTX interpreter, between a prologue and an end that all such tests share.
#pragma once
#include <gtest/gtest.h>

#include "../../dev/emulator/ptx/prediction.h"
#include "../../llmc/core/dtype.h"

// A function that nvcc did not inline: declared, called, and defined at the end.
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

// Arrays of 4096 words: x holds its indices, y is the result. A thread knows %r0 itself, %r1 its block, %r2 the block's shared memory;
// %rd0 and %rd1 the arrays, %rd2 and %rd3 its own words of them, %r3 its own word of shared memory.
inline constexpr const char *prologue = R"(
    .extern .shared .align 1024 .b8 buffer[];
    .visible .entry kernel(.param .u64 kernel_param_0, .param .u64 .ptr .global .align 1 kernel_param_1)
    {
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .f32 %f<99>; .reg .f64 %fd<9>; .reg .b64 %rd<99>;
    ld.param.u64 %rd0, [kernel_param_0];
    ld.param.u64 %rd1, [kernel_param_1];
    mov.u32 %r0, %tid.x;  mov.u32 %r1, %ctaid.x;  mov.u32 %r2, buffer;
    mul.wide.u32 %rd2, %r0, 4;  add.s64 %rd3, %rd1, %rd2;  add.s64 %rd2, %rd0, %rd2;
    shl.b32 %r3, %r0, 2;  add.s32 %r3, %r3, %r2;
)";
inline constexpr size_t words = 4096;

struct Result {
    ptx::Counts counts;
    std::vector<uint32_t> y;
};

// `variables` are the module's.
inline Result launch(const std::string &body, const ptx::Launch &how, const std::string &variables = "") {
    ptx::Module module(declaration + (variables + prologue + body) + "\nret;\n}\n" + definition);
    alignas(256) static uint32_t x[words], y[words];
    for (uint32_t i = 0; i < words; i++) x[i] = i, y[i] = 0;
    Result result;
    uint32_t *const px = x, *const py = y;
    ptx::DeviceMemory memory;
    memory.add(px, sizeof x);
    memory.add(py, sizeof y);
    result.counts = ptx::run(module.kernel("kernel"), how, {&px, &py}, memory);
    result.y.assign(y, y + words);
    return result;
}
inline Result run(const std::string &body, unsigned threads = 32, unsigned blocks = 1, size_t shared = 16384) {
    return launch(body, {{blocks}, {threads}, shared, true});
}
