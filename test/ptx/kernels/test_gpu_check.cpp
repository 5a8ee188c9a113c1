// The check before the first step, on kernels that are broken in their PTX: it names the op.
#include "../../../llmc/app/gpu_check.h"

#include "../../../dev/emulator/ptx/runtime.h"
#include "../../models.h"

namespace {
std::string message_if(const std::string &kernel, const std::string &from, const std::string &to) {
    const ptx::EditedPtx edited([&](std::string &text) {
        const size_t entry = text.find(".entry " + kernel), at = entry == text.npos ? text.npos : text.find(from, entry);
        if (at == text.npos) return false;
        text.replace(at, from.size(), to);
        return true;
    });
    EXPECT_GT(edited.edited, 0u) << kernel << " has no " << from;
    const auto context = make_cuda_context(1);
    try {
        check_gpu(models_on(CudaF32{nullptr, context.get()}), cpu_models<float>(), preset("qwen2.5-0.5b"), {}, false);
    } catch (const Error &error) {
        return error.what();
    }
    return "no message";
}
}  // namespace

TEST(PtxGpuCheck, ABrokenKernelIsNamed) {
    const std::string swiglu = message_if("_ZN3gpu22swiglu_forward_kernel4IL4Gate0EfLi4E", "mul.f32", "add.f32");
    EXPECT_EQ(swiglu.substr(0, swiglu.find('[')),
              "GPU check: forward, layer 0, activation on the PTX interpreter does not agree with the CPU: act.0.act");
    EXPECT_NE(swiglu.find("\n  fix: do not train on this GPU with this program."), swiglu.npos);
    printf("  %s\n", swiglu.c_str());
}
