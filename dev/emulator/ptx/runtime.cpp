#include "runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "tensor_map.h"

namespace ptx {
namespace {

// ---- the program's modules --------------------------------------------------------------------------------------------------------

struct Registered {  // a kernel; runtime calls name it by the address of its host stub
    std::string mangled;
    size_t module;
    std::optional<size_t> most_dynamic;  // set by cudaFuncSetAttribute; by default static and dynamic bytes share 48 KiB
    int carveout = cudaSharedmemCarveoutDefault;
};

struct State {
    std::mutex lock;  // ranks are threads; their launches take turns
    std::vector<std::string> texts;
    std::vector<std::unique_ptr<Module>> modules;
    std::map<const void *, Registered> kernels;
    std::map<std::string, Launches> launched;  // by kernel and shape
    DeviceMemory memory;
};
State &state() {  // registration happens before main(), in an unspecified order
    static State *const s = new State;
    return *s;
}

// A fat binary is a header and a list of entries; an entry of kind 1 is PTX. The format is not documented.
struct FatHeader {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;  // behind the header
};
struct FatEntry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;  // behind the header
};
struct FatWrapper {
    uint32_t magic, version;
    const FatHeader *binary;
    void *file;
};

std::string ptx_of(const FatWrapper &wrapper) {
    const char *at = reinterpret_cast<const char *>(wrapper.binary) + wrapper.binary->header_bytes;
    for (const char *const end = at + wrapper.binary->bytes; at < end;) {
        FatEntry entry;
        memcpy(&entry, at, sizeof entry);
        const std::string text(at + entry.header_bytes, entry.bytes);
        if (entry.kind == 1 && text.find(".version") != std::string::npos) return text.substr(0, text.find('\0'));
        at += entry.header_bytes + entry.bytes;
    }
    die("a file of this program carries no readable PTX\n  fix: nvcc -gencode arch=compute_90,code=compute_90 --no-compress");
}

// ---- launches ---------------------------------------------------------------------------------------------------------------------

struct Call {  // the launch configuration that <<< >>> passes to the host function of the kernel
    dim3 grid, threads;
    size_t shared;
    cudaStream_t stream;
};
thread_local std::vector<Call> calls;
thread_local cudaError_t last_error = cudaSuccess;

void remember(State &s, const Kernel &kernel, const Launch &launch, int carveout, const Counts &counts) {
    Launches &all =
        s.launched[kernel.mangled + " " + launch.grid.text() + " " + launch.threads.text() + format(" %zu", launch.shared)];
    all.mangled = kernel.mangled, all.name = kernel.name, all.launch = launch, all.carveout = carveout;
    all.launch.shared += kernel.static_shared;
    const auto by_pipe = counts.by_pipe(kernel);
    for (size_t n = 0; n < pipes; n++) all.by_pipe[n] += by_pipe[n];
    all.launches++, all.barriers += counts.barriers, all.divergent_branches += counts.divergent_branches,
        all.seconds += counts.seconds;
    all.traffic += counts.traffic;
    all.blocks.resize(counts.blocks.size());
    for (size_t b = 0; b < counts.blocks.size(); b++) {
        for (size_t n = 0; n < units; n++) all.blocks[b].demand[n] += counts.blocks[b].demand[n];
        all.blocks[b].latency += counts.blocks[b].latency;
    }
}

cudaError_t launch(const void *host_function, dim3 grid, dim3 threads, void **arguments, size_t shared,
                   Extent cluster = {0, 0, 0}) {
    State &s = state();
    const std::lock_guard guard(s.lock);
    const Registered &registered = s.kernels.at(host_function);
    const Kernel &kernel = s.modules[registered.module]->kernel(registered.mangled);
    const size_t all_shared = shared + kernel.static_shared;
    if (registered.most_dynamic ? shared > *registered.most_dynamic || all_shared > max_shared_of(kernel.architecture)
                                : all_shared > max_static_shared)
        return cudaErrorInvalidValue;
    Launch how{{grid.x, grid.y, grid.z}, {threads.x, threads.y, threads.z}, shared, counting, cluster, sample};
    how.last_first = last_first, how.sums_in_order = sums_in_order;
    remember(s, kernel, how, registered.carveout,
             run(kernel, how, std::vector<const void *>(arguments, arguments + kernel.parameters.size()), s.memory));
    return cudaSuccess;
}
}  // namespace

bool counting = getenv("PTX_COUNT") != nullptr;
size_t sample = 0;
bool last_first = false, sums_in_order = false;
int compute_capability = 90;

Count Launches::total() const {
    Count sum;
    for (const Count &c : by_pipe) sum += c;
    return sum;
}

std::vector<Launches> launched() {
    const std::lock_guard guard(state().lock);
    std::vector<Launches> all;
    for (const auto &[key, launches] : state().launched) all.push_back(launches);
    return all;
}

void forget_launches() {
    const std::lock_guard guard(state().lock);
    state().launched.clear();
}

std::vector<std::string> program_kernels() {
    const std::lock_guard guard(state().lock);
    std::vector<std::string> all;
    for (const auto &[host_function, kernel] : state().kernels) all.push_back(kernel.mangled);
    return all;
}

bool allocated(const void *p, size_t bytes) {
    const std::lock_guard guard(state().lock);
    return state().memory.at_or_before(uintptr_t(p)).holds(uintptr_t(p), bytes);
}

EditedPtx::EditedPtx(const std::function<bool(std::string &)> &edit) {
    State &s = state();
    const std::lock_guard guard(s.lock);
    for (size_t n = 0; n < s.texts.size(); n++) {
        std::string text = s.texts[n];
        if (!edit(text)) continue;
        s.modules[n] = std::make_unique<Module>(text);
        edited++;
    }
}
EditedPtx::~EditedPtx() {
    State &s = state();
    const std::lock_guard guard(s.lock);
    for (size_t n = 0; n < s.texts.size(); n++)
        if (s.modules[n]->text() != s.texts[n]) s.modules[n] = std::make_unique<Module>(s.texts[n]);
}
}  // namespace ptx

using ptx::state;

// ---- functions called by nvcc's generated code ------------------------------------------------------------------------------------

extern "C" {
void **__cudaRegisterFatBinary(void *wrapper) {
    auto &s = state();
    s.texts.push_back(ptx::ptx_of(*static_cast<const ptx::FatWrapper *>(wrapper)));
    s.modules.push_back(std::make_unique<ptx::Module>(s.texts.back()));
    return reinterpret_cast<void **>(s.texts.size() - 1);
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **module, const char *host_function, char *, const char *name, int, uint3 *, uint3 *, dim3 *,
                            dim3 *, int *) {
    state().kernels[host_function] = {name, reinterpret_cast<size_t>(module), {}};
}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}  // the interpreter reads them in the PTX
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 threads, size_t shared, cudaStream_t stream) {
    ptx::calls.push_back({grid, threads, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *threads, size_t *shared, void *stream) {
    const ptx::Call call = ptx::calls.back();
    ptx::calls.pop_back();
    *grid = call.grid, *threads = call.threads, *shared = call.shared;
    memcpy(stream, &call.stream, sizeof call.stream);
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host_function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(host_function));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 threads, void **arguments, size_t shared, cudaStream_t) {
    return ptx::last_error = ptx::launch(kernel, grid, threads, arguments, shared);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *host_function, void **arguments) {
    ptx::Extent cluster{0, 0, 0};
    for (unsigned n = 0; n < how->numAttrs; n++)
        if (const auto &[id, pad, value] = how->attrs[n]; id == cudaLaunchAttributeClusterDimension)
            cluster = {value.clusterDim.x, value.clusterDim.y, value.clusterDim.z};
    return ptx::last_error = ptx::launch(host_function, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes, cluster);
}

// ---- tensor maps: the one function of the driver, which programs ask the runtime for ------------------------------------------------

static CUresult encode_tiled(CUtensorMap *out, CUtensorMapDataType type, cuuint32_t rank, void *base, const cuuint64_t *dims,
                             const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
                             CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                             CUtensorMapFloatOOBfill fill) {
    ptx::TensorMap map;
    map.base = uint64_t(base), map.rank = uint8_t(rank);
    map.element = ptx::Element(type), map.swizzle = uint8_t(swizzle);
    bool plain = uintptr_t(out) % 64 == 0 && type <= CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ &&
                 interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    for (unsigned d = 0; d < rank && d < ptx::TensorMap::most_dimensions; d++) {
        map.dims[d] = dims[d], map.box[d] = uint16_t(std::min(box[d], 65535u));
        if (d + 1 < rank) map.strides[d] = strides[d];
        plain &= element_strides[d] == 1;
    }
    const std::string problem = plain ? broken_rule(map) : "interleaving, steps and NaN outside are not interpreted";
    if (!problem.empty()) fprintf(stderr, "cuTensorMapEncodeTiled: %s\n", problem.c_str());
    if (!problem.empty()) return CUDA_ERROR_INVALID_VALUE;
    return memcpy(out, &map, sizeof map), CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
    const bool known = !strcmp(name, "cuTensorMapEncodeTiled");
    *function = known ? reinterpret_cast<void *>(encode_tiled) : nullptr;
    if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// ---- what our host code calls -----------------------------------------------------------------------------------------------------

cudaError_t cudaFuncGetName(const char **name, const void *host_function) {
    return *name = state().kernels.at(host_function).mangled.c_str(), cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *host_function, cudaFuncAttribute attribute, int value) {
    ptx::Registered &kernel = state().kernels.at(host_function);
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout && value >= -1 && value <= 100)
        return kernel.carveout = value, cudaSuccess;
    if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > int(ptx::max_shared))
        return cudaErrorInvalidValue;
    return kernel.most_dynamic = size_t(value), cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(ptx::last_error, cudaSuccess); }
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : error == cudaErrorMemoryAllocation ? "out of memory" : "invalid argument";
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
    if (posix_memalign(p, 256, std::max<size_t>(bytes, 1))) return ptx::last_error = cudaErrorMemoryAllocation;
    memset(*p, 0xff, bytes);  // NaN
    const std::lock_guard guard(state().lock);
    state().memory.add(*p, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void *p) {
    const std::lock_guard guard(state().lock);
    state().memory.remove(p);
    return free(p), cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) {
    return (*p = malloc(bytes)) ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFreeHost(void *p) { return free(p), cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    *free = size_t(sysconf(_SC_AVPHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
    *total = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    if (bytes) memcpy(to, from, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemsetAsync(void *to, int byte, size_t bytes, cudaStream_t) {
    if (bytes) memset(to, byte, bytes);
    return cudaSuccess;
}

// A stream has no state, because all calls have ended when they return; an event is the time of its recording.
using Time = std::chrono::steady_clock::time_point;
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int priority) {
    return *stream = reinterpret_cast<cudaStream_t>(new int(priority)), cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    return *priority = *reinterpret_cast<int *>(stream), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete reinterpret_cast<int *>(stream), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    return *event = reinterpret_cast<cudaEvent_t>(new Time), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<Time *>(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    const auto products = std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(ptx::seconds));
    return *reinterpret_cast<Time *>(event) = std::chrono::steady_clock::now() + products, cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    const auto between = *reinterpret_cast<Time *>(end) - *reinterpret_cast<Time *>(begin);
    return *milliseconds = std::chrono::duration<float, std::milli>(between).count(), cudaSuccess;
}

// Graph capture is not supported: the interpreter runs every launch at once.
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaErrorNotSupported; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *) { return cudaErrorNotSupported; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *, cudaGraph_t, unsigned long long) { return cudaErrorNotSupported; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaErrorNotSupported; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaErrorNotSupported; }

cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    if (attribute == cudaDevAttrComputeCapabilityMajor) return *value = ptx::compute_capability / 10, cudaSuccess;
    if (attribute == cudaDevAttrComputeCapabilityMinor) return *value = ptx::compute_capability % 10, cudaSuccess;
    return cudaErrorInvalidValue;
}
cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int) { return snprintf(id, size_t(length), "none"), cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
    *properties = {};
    strcpy(properties->name, "the PTX interpreter");
    properties->major = ptx::compute_capability / 10, properties->minor = ptx::compute_capability % 10;
    return cudaSuccess;
}
}
