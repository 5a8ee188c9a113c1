#include "report.h"

#include <cmath>

namespace ptx {
namespace {

struct Column {
    const char *name;
    int width;
};
const Column columns[] = {{"what", 22},       {"kernel", 44},   {"launches", 8},    {"blocks", 7},    {"threads", 7},
                          {"shared", 6},      {"registers", 9}, {"spilled", 7},     {"occupancy", 9}, {"warp inst.", 11},
                          {"active", 6},      {"Mflop", 8},     {"requests", 9},    {"per req.", 8},  {"kB read", 9},
                          {"kB written", 10}, {"kB L2", 9},     {"wavefronts", 10}, {"conflicts", 9}, {"barriers", 8},
                          {"pipes", 0}};

// The mean of several launches with the same shape.
LaunchWork mean_launch(const Launches &l, int registers) {
    LaunchWork out{l.launch, registers, l.blocks, l.traffic};
    for (BlockWork &block : out.blocks) {
        for (double &x : block.demand) x /= double(l.launches);
        block.latency /= double(l.launches);
    }
    out.traffic = {l.traffic.read / l.launches, l.traffic.written / l.launches, l.traffic.l2 / l.launches,
                   l.traffic.bulk / l.launches};
    return out;
}

std::string quoted(const std::string &s) { return s.find(',') == s.npos ? s : '"' + s + '"'; }

void print_cells(std::vector<std::string> cells, bool csv) {
    std::string line;
    for (size_t n = 0; n < cells.size(); n++) {
        const int width = n < std::size(columns) ? columns[n].width : 0;
        if (csv) line += format("%s%s", n ? "," : "", quoted(cells[n]).c_str());
        else line += format(n < 2 ? "%-*s  " : "%*s  ", width, cells[n].substr(0, width ? size_t(width) : cells[n].npos).c_str());
    }
    printf("%s\n", line.c_str());
}
}  // namespace

void print_counts_header(bool csv) {
    std::vector<std::string> names;
    for (const Column &c : columns) names.push_back(c.name);
    for (const Gpu &gpu : gpus) names.push_back(format("%s us", gpu.name)), names.push_back("bound");
    if (!csv) names.erase(names.begin() + std::size(columns) - 1);  // the pipes have a line of their own
    print_cells(names, csv);
}

void print_counts(const std::string &what, const std::vector<Launches> &launched, const std::map<std::string, MachineCode> &code,
                  bool csv) {
    for (const Launches &l : launched) {
        const Count all = l.total();
        const auto per_launch = [&](uint64_t count) { return double(count) / double(l.launches); };
        const auto kb = [&](uint64_t bytes) { return format("%.1f", per_launch(bytes) / 1e3); };
        const auto whole = [&](uint64_t count) { return format("%.0f", per_launch(count)); };
        const auto found = code.find(l.mangled);
        const bool known = found != code.end();
        const double flops = per_launch(l.by_pipe[size_t(Pipe::tensor)].flop);
        std::string in_pipes;
        for (size_t p = 0; p < pipes; p++)
            if (l.by_pipe[p].executed) in_pipes += format(" %s %.0f", pipe_names[p], per_launch(l.by_pipe[p].executed));
        std::vector<std::string> cells = {
            what,
            l.name,
            std::to_string(l.launches),
            std::to_string(l.launch.grid.count()),
            std::to_string(l.launch.threads.count()),
            std::to_string(l.launch.shared),
            known ? std::to_string(found->second.registers) : "-",
            known ? std::to_string(found->second.spilled) : "-",
            known ? format("%.0f %%", 100 * occupancy(l.launch, found->second.registers, gpus[0])) : "-",
            whole(all.executed),
            format("%.1f", double(all.threads) / double(all.executed)),
            format("%.2f", flops / 1e6),
            whole(all.requests),
            format("%.2f", all.requests ? double(all.sectors) / double(all.requests) : 0),
            kb(l.traffic.read),
            kb(l.traffic.written),
            kb(l.traffic.l2),
            whole(all.wavefronts),
            whole(all.wavefronts - all.least_wavefronts),
            whole(l.barriers)};
        if (csv) cells.push_back(in_pipes.substr(1));
        for (const Gpu &gpu : gpus) {
            const Prediction p = predict(mean_launch(l, known ? found->second.registers : 0), gpu);
            cells.push_back(std::isinf(p.seconds) ? "-" : format("%.2f", p.seconds * 1e6)), cells.push_back(p.bound);
        }
        print_cells(cells, csv);
        if (!csv) printf("   %s\n", in_pipes.c_str());
    }
}
}  // namespace ptx
