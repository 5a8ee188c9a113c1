#include "version.h"

#include <omp.h>
#ifdef LLMC_ONEDNN
#include <oneapi/dnnl/dnnl.h>
#elif defined LLMC_OPENBLAS
extern "C" char *openblas_get_config();
#endif

#include "../core/common.h"
#include "../data/python.h"
#include "../parallel/comm_mpi.h"

extern const char *const commit;  // make writes its file

static std::string matrix_products() {
#ifdef LLMC_ONEDNN
    const dnnl_version_t *v = dnnl_version();
    return format("oneDNN %d.%d.%d", v->major, v->minor, v->patch);
#elif defined LLMC_OPENBLAS
    return openblas_get_config();
#else
    return "this program's own products";
#endif
}

static std::string gpus(const Program &program) {
    if (!program.query_gpus) return "no kernels for GPUs";
    const GpuQuery q = program.query_gpus();
    std::string text = format("CUDA %d.%d, driver %d.%d, kernels for", q.runtime / 1000, q.runtime / 10 % 100, q.driver / 1000,
                              q.driver / 10 % 100);
    for (const int arch : q.archs) text += format(" sm_%d", arch);
    for (const auto &[name, arch] : q.gpus) text += format("; %s", name.c_str());
    return text;
}

static std::string python() {
    try {
        std::string text = run_python("--version", "data/versions.py", {});
        text.resize(text.find_last_not_of('\n') + 1);
        return text;
    } catch (const Error &e) {
        const std::string what = e.what();
        return what.substr(0, what.find('\n'));
    }
}

std::string version(const Program &program) {
    return format("%s, commit %s\ncompiled by %s %s\n%s; %s; %s\n%s\n", program.name, *commit ? commit : "unknown",
#ifdef __clang__
                  "clang",
#else
                  "g++",
#endif
                  __VERSION__, matrix_products().c_str(), mpi_library().c_str(), gpus(program).c_str(), python().c_str());
}
