// The emulator's error messages about kernels: the violation, its lines, its thread, and the launch.
#include <dlfcn.h>
#include <unistd.h>

#include <map>

#include "block.h"

namespace CUDA_BACKEND::simt {
namespace {
// addr2line's answer for an address of this program: pairs of function and FILE:LINE, innermost inlined function first.
// Answers are cached, because each call takes a large part of a second.
using Frames = std::vector<std::pair<std::string, std::string>>;
Frames frames(const void *pc) {
    static std::mutex lock;
    static std::map<const void *, Frames> known;
    const std::lock_guard guard(lock);
    if (const auto found = known.find(pc); found != known.end()) return found->second;
    Frames &out = known[pc];
    Dl_info info;
    if (!dladdr(pc, &info)) return out;
    const size_t offset = size_t(static_cast<const char *>(pc) - static_cast<char *>(info.dli_fbase));
    FILE *pipe = popen(format("addr2line -f -C -i -e /proc/%d/exe %#zx 2> /dev/null", int(getpid()), offset).c_str(), "r");
    if (!pipe) return out;
    char function[4096], line[4096];
    while (fgets(function, sizeof function, pipe) && fgets(line, sizeof line, pipe)) {
        function[strcspn(function, "\n")] = line[strcspn(line, "\n")] = 0;
        if (char *more = strstr(line, " (discriminator ")) *more = 0;
        out.emplace_back(function, line);
    }
    pclose(pipe);
    return out;
}

std::string base_name(const std::string &path) { return path.substr(path.rfind('/') + 1); }
}  // namespace

std::string where(Place place) {
    std::string out;
    const auto call = reinterpret_cast<const void *>(uintptr_t(place.pc) - 1);  // pc is the return address
    for (const auto &[function, line] : frames(call))
        if (line[0] != '?' && base_name(line).rfind("simt.", 0) != 0) out += (out.empty() ? "" : " < ") + base_name(line);
    if (!out.empty() || !place.at.line()) return out.empty() ? "an unknown line" : out;
    return format("%s:%u", base_name(place.at.file_name()).c_str(), unsigned(place.at.line()));
}

std::string call_site(void *const *pcs, int n) {
    for (int i = 0; i < n; i++)
        for (const auto &[function, line] : frames(static_cast<std::byte *>(pcs[i]) - 1))
            if (line[0] != '?' && !line.starts_with("/usr/") && line.find("/emulator/") == std::string::npos &&
                line.find("parallel/comm") == std::string::npos)
                return base_name(line);
    return "an unknown line";
}

std::string kernel_name(const void *kernel) {  // from "void emulated::op_kernel<bf16>(bf16*, unsigned long)"
    const auto found = frames(kernel);
    if (found.empty() || found.back().first == "??") return "a kernel";
    std::string name = found.back().first;
    size_t end = name.size();
    if (name.ends_with(')')) {
        int open = 0;
        do {
            end--;
            open += (name[end] == ')') - (name[end] == '(');
        } while (open && end);
    }
    const size_t space = name.find(' '), begin = space < name.find_first_of("<(") ? space + 1 : 0;
    name = name.substr(begin, end - begin);
    return name.rfind("emulated::", 0) == 0 ? name.substr(strlen("emulated::")) : name;
}

std::string lanes(unsigned mask) { return format("%#010x", mask); }

void keep(const std::string &cause, const char *fix) {
    Launch &launch = *block->launch;
    const std::lock_guard guard(launch.lock);
    if (block->number >= launch.failed_block) return;
    launch.failed_block = block->number;
    const std::source_location at = launch.grid.at;
    launch.failure = format("%s of %s, launched at %s:%u\n  fix: %s", cause.c_str(), kernel_name(launch.kernel).c_str(),
                            base_name(at.file_name()).c_str(), unsigned(at.line()), fix);
}

void report(Place place, const std::string &cause, const char *fix) {
    const uint3 b = block->index, t = current->index;
    keep(format("%s\n  at %s, block (%u,%u,%u) thread (%u,%u,%u)", cause.c_str(), where(place).c_str(), b.x, b.y, b.z, t.x, t.y,
                t.z),
         fix);
}
}  // namespace CUDA_BACKEND::simt
