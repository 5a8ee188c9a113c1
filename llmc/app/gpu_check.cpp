#include "gpu_check.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/hash.h"

OpResults cpu_op_results(const std::string &dtype) {
    const ContextPtr context = make_context();
    return dtype == "bf16" ? run_ops(CpuBf16{1, context.get()}) : run_ops(CpuF32{1, context.get()});
}

size_t compare_ops(const OpResults &gpu, const OpResults &cpu, bool rounded, const std::string &device) {
    const double share = rounded ? 0x1p-6 : 0x1p-14;  // four roundings of a bf16; float sums of some hundred terms
    std::set<std::string> ops;
    if (gpu.size() != cpu.size()) die("the check of the GPU has %zu arrays, and %zu on the CPU", gpu.size(), cpu.size());
    for (size_t n = 0; n < cpu.size(); n++) {
        const std::vector<float> &got = gpu[n].values, &want = cpu[n].values;
        double largest = 0, error = 0;
        size_t worst = 0;
        for (float x : want) largest = std::max(largest, std::fabs(double(x)));
        for (size_t i = 0; i < want.size(); i++) {
            const double difference = std::fabs(double(got[i]) - double(want[i]));
            if (!(difference <= error)) error = difference, worst = i;
            if (std::isnan(difference)) break;
        }
        if (!(error <= share * largest))
            die("GPU check: %s on %s does not agree with the CPU: %s[%zu] is %.6g and should be %.6g, give or take %.2g\n"
                "  fix: do not train on this GPU with this program. Build again (make clean; make), try another driver, or --device cpu; "
                "scripts/gpu_check.sh finds out more",
                cpu[n].op, device.c_str(), cpu[n].array, worst, double(got[worst]), double(want[worst]), share * largest);
        ops.insert(cpu[n].op);
    }
    return ops.size();
}

// An empty file of the cache, named by all that could change a result.
static std::string memory_of(const std::string &key) {
    const InputFile program("/proc/self/exe");
    return cache_file("gpu_check_" + hash_of(key + " " + fingerprint(program)));
}

bool gpu_check_is_due(const std::string &option, const std::string &key) {
    return option == "always" || (option == "once" && !std::filesystem::exists(memory_of(key)));
}
void remember_gpu_check(const std::string &key) { write_file(memory_of(key), ""); }
