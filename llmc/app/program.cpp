#include "program.h"

#include <fcntl.h>
#include <omp.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>

#include "../core/common.h"
#include "../core/contention.h"
#include "../core/signals.h"
#include "../data/python.h"
#include "../parallel/comm_mpi.h"
#include "../parallel/comm_sockets.h"
#include "tasks.h"
#include "version.h"

// The query of a program without kernels: only the presence of a driver, which its user may expect it to use.
static GpuQuery query_driver() {
    GpuQuery query;
    query.driver = std::filesystem::exists("/proc/driver/nvidia/version") ? 1 : 0;
    return query;
}

static bool finds_gpu(const Program &program, const Options &o, std::string &note) {
    return use_gpu(name_of(o.device), program.query_gpus ? program.query_gpus() : query_driver(), note);
}

// Decides whether to compute on a GPU, and sets the options that depend on it. --plan --gpu needs no GPU, only the scratch sizes of kernels.
static bool choose_device(const Program &program, Options &o, bool is_main_rank) {
    std::string note;
    const bool gpu = program.cuda_device && o.plan && !o.gpu.empty() ? o.device != Processor::cpu : finds_gpu(program, o, note);
    if (!note.empty() && is_main_rank) printf("note: %s\n", note.c_str());
    o.device = gpu ? Processor::cuda : Processor::cpu;
    if (!o.dtype) o.dtype = gpu || !o.gpu.empty() ? Dtype::bf16 : Dtype::f32;  // on GPUs bf16 is the default
    if (o.dtype == Dtype::tf32 && !gpu) {
        o.dtype = Dtype::f32;
        if (is_main_rank)
            printf("note: --dtype tf32 is for a GPU's tensor cores; a CPU multiplies floats in full precision, as with f32\n");
    }
    if (gpu && !o.plan && !cache_is_writable() && is_main_rank)
        printf("note: products are not tuned, because the cache cannot be written (XDG_CACHE_HOME, or ~/.cache)\n");
    if (o.cuda_graphs && !gpu && is_main_rank)
        printf("note: --cuda_graphs is for launches on a GPU, and there are none in this run\n");
    const bool for_gpu = gpu || !o.gpu.empty();
    if (o.fp8 && for_gpu && o.dtype != Dtype::bf16)
        die("--fp8 rounds weights and activations in bf16, and --dtype is %s\n  fix: use --dtype bf16, or leave --fp8 out",
            name_of(o.dtype).c_str());
    if (o.fp8 && !gpu_has_fp8(o.gpu))
        die("--fp8 needs tensor cores of compute capability 8.9 or later, and --gpu %s has none\n  fix: use another GPU, or leave --fp8 out",
            o.gpu.c_str());
    if (o.fp8 && gpu && program.query_gpus)
        for (const GpuQuery::Gpu &g : program.query_gpus().gpus)
            if (g.arch < 89)
                die("--fp8 needs tensor cores of compute capability 8.9 or later, and %s has %d.%d\n  fix: use another GPU (CUDA_VISIBLE_DEVICES), or leave --fp8 out",
                    g.name.c_str(), g.arch / 10, g.arch % 10);
    if (!o.offload.empty() && !for_gpu && o.offload_dir.empty())
        die("--offload on a CPU needs a disk for the offloaded arrays\n  fix: --offload_dir DIR, on a local disk");
    if (for_gpu && !o.offload_dir.empty())
        die("--offload_dir %s: a GPU offloads to the host's memory\n  fix: leave --offload_dir out", o.offload_dir.c_str());
    return gpu;
}

// Runs one rank. `threads`: all ranks are threads of this process.
static int run_rank(const Program &program, Parsed parsed, Comm &host, bool threads) {
    const bool is_main_rank = host.rank == 0;
    Options &o = parsed.options;
    for (const std::string &note : parsed.notes)
        if (is_main_rank) fprintf(notes_stream(parsed.task), "note: %s\n", note.c_str());
    const auto hosts = host.gather(host_name());
    const size_t here = size_t(std::count(hosts.begin(), hosts.end(), hosts[size_t(host.rank)]));  // ranks on this machine
    if (o.threads == 0)
        o.threads =
            getenv("OMP_NUM_THREADS") ? size_t(omp_get_max_threads()) : std::max<size_t>(1, size_t(omp_get_num_procs()) / here);
    omp_set_num_threads(int(o.threads));  // for parallel regions without num_threads
    bool gpu = false;
    agree(host, [&] { gpu = choose_device(program, o, is_main_rank); });
    const auto gpus = host.gather(int(gpu));
    agree(host, [&] {
        for (size_t r = 0; r < gpus.size(); r++)
            if (gpus[r] != gpus[0])
                die("rank %zu on %s has %s GPU that can be used, unlike rank 0 on %s\n  fix: --device cpu, or other hosts", r,
                    hosts[r].c_str(), gpus[r] ? "a" : "no", hosts[0].c_str());
    });
    Device device = program.cpu_device(o);  // owns the stream that gpu_comm uses, so it must be destroyed after it
    std::unique_ptr<Comm> gpu_comm;
    if (gpu) device = program.cuda_device(o, device.make_model, host, !threads && host.size > 1, gpu_comm);
    return run_task(program.name, parsed, gpu_comm ? *gpu_comm : host, threads || !gpu ? here : 1, device);
}

// Ranks started by hand exchange data by NCCL, from GPU to GPU.
static int run_by_hand(const Program &program, const Options &o, const std::function<int(Comm &)> &run) {
    const auto [rank, processes] = started_by_hand(o);
    if (std::string note; !finds_gpu(program, o, note))
        die("--rendezvous is for ranks with a GPU each, and this one would compute on a CPU%s\n  fix: for ranks on CPUs scripts/launch.sh -np %d "
            "%s ... (MPI), or --ranks %d (threads of one process)",
            note.empty() ? "" : (" (" + note + ")").c_str(), int(processes), program.called.c_str(), int(processes));
    return run_sockets({rank, processes, o.rendezvous}, {.timeout = o.comm_timeout}, run);
}

static int run_all_ranks(const Program &program, const std::vector<std::string> &arguments) {
    const std::string first = arguments.empty() ? "" : arguments[0];
    if (first == "plot" || first == "report")
        return call_python(program.called + " " + first, "scripts/" + first + ".py", {arguments.begin() + 1, arguments.end()});
    if (first == "--version") {
        if (arguments.size() > 1) die("--version stands alone, without \"%s\"\n  fix: leave it out", arguments[1].c_str());
        return printf("%s", version(program).c_str()) < 0;
    }
    Parsed parsed;
    const auto parse_arguments = [&] { parsed = parse(program.called, arguments, program.bundled); };
    const auto run = [&](Comm &comm, bool threads) {
        if (parsed.help.empty()) return run_rank(program, parsed, comm, threads);
        if (comm.rank == 0) printf("%s", parsed.help.c_str());
        return 0;
    };
    if (started_by_mpirun()) {
        std::string wrong;  // all ranks read the same flags, and one rank prints the error
        try {
            parse_arguments();
        } catch (const std::exception &error) {
            wrong = message_of(error);
        }
        const Options &o = parsed.options;
        return run_mpi({.timeout = o.comm_timeout}, [&](Comm &comm) {
            agree(comm, [&] {
                if (!wrong.empty()) throw Error(wrong);
                if (o.ranks > 1 && !o.plan)
                    die("--ranks %zu makes ranks of threads, but mpirun has started %d processes\n  fix: leave out --ranks or mpirun",
                        o.ranks, comm.size);
                if (!o.rendezvous.empty())
                    die("--rendezvous is for ranks started by hand, but mpirun has started %d\n  fix: leave out --rendezvous or mpirun",
                        comm.size);
            });
            return run(comm, false);
        });
    }
    parse_arguments();
    const Options &o = parsed.options;
    const CommOptions options = {.timeout = o.comm_timeout};
    const bool alone = o.plan || parsed.show || !parsed.help.empty();
    if (!o.rendezvous.empty() && !alone) return run_by_hand(program, o, [&](Comm &comm) { return run(comm, false); });
    if (!alone) expect_to_be_alone();
    if (o.ranks > 1 && !alone) return run_threads(int(o.ranks), options, [&](Comm &comm) { return run(comm, true); });
    SelfComm comm;
    return run(comm, true);
}

// Opens closed standard streams as files that can be neither read nor written: otherwise the next opened file would get the descriptor, and
// the output would go there. Writing to a pipe without a reader becomes an error that does not kill the process.
static void expect_streams() {
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
        if (fcntl(fd, F_GETFD) < 0)
            open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);  // gets the lowest free descriptor
    signal(SIGPIPE, SIG_IGN);
}

std::string called_name(const char *name, const char *argv0) { return (strchr(argv0, '/') ? "./" : "") + std::string(name); }

int run_program(const Program &program, const std::vector<std::string> &arguments) {
    expect_streams();
    expect_interrupts();
    const ContentionWatch watch;
    try {
        const int code = run_all_ranks(program, arguments);
        const bool lost = ferror(stdout);  // errno may be from a later call
        if (fflush(stdout) != 0 || lost)
            die("not all output reached its file or pipe%s%s\n  fix: free space there, or keep the reader open to the end",
                lost ? "" : ": ", lost ? "" : strerror(errno));
        return code;
    } catch (const std::exception &error) {
        fflush(stdout);
        fprintf(stderr, "%s: %s\n", program.name, message_of(error).c_str());
        return 1;
    }
}
