// The parameters of all ranks, from stage 3 of ZeRO, too, where each rank has its part alone.
#pragma once
#include "../llmc/parallel/zero.h"

// What a model gathers before it reads each unit's parameters; empty before stage 3.
template <class Dev>
std::vector<std::vector<typename Dev::X>> gather_units(Zero<Dev> &zero, Comm &comm, const std::vector<Unit> &units) {
    std::vector<std::vector<typename Dev::X>> out;
    if (zero.sharding.stage < 3) return out;
    for (const Unit &u : units) {
        zero.fetch(comm, u.begin, u.end, out.emplace_back(zero.sharding.padded_count(u.begin, u.end)).data());
        zero.ready(comm, u.begin, u.end);
    }
    return out;
}

// By global offsets.
template <class Dev>
std::vector<float> params_of(Zero<Dev> &zero, const std::vector<std::vector<typename Dev::X>> &gathered,
                             const std::vector<Unit> &units) {
    std::vector<float> out;
    for (size_t u = 0; u < units.size(); u++) {
        const auto *const from = gathered.empty() ? zero.params + zero.sharding.flat(units[u].begin) : gathered[u].data();
        out.insert(out.end(), from, from + (units[u].end - units[u].begin));
    }
    return out;
}
