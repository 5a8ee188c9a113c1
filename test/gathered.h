// Gathers the parameters of all ranks, including divided and offloaded ones.
#pragma once
#include "../llmc/parallel/zero.h"

// The parameters of each unit, as a model fetches them before use; empty if each rank has all of them in memory.
template <class Dev>
std::vector<std::vector<typename Dev::X>> gather_units(Zero<Dev> &zero, Comm &comm, const std::vector<Unit> &units) {
    using X = typename Dev::X;
    std::vector<std::vector<X>> out;
    HostMemory memory;
    for (size_t u = 0; zero.prefetched() && u < units.size(); u++) {
        const size_t begin = units[u].begin, end = units[u].end;
        const size_t own_count = zero.sharding.unit_begins[u + 1] - zero.sharding.unit_begins[u];
        const size_t bytes = round_up(own_count * sizeof(X), store_alignment);
        X *const own = zero.pieces.any() ? reinterpret_cast<X *>(memory.allocate(bytes)) : nullptr;
        if (own) zero.pieces.bring(u, own), zero.pieces.wait(u);
        if (zero.sharding.divided) {
            zero.fetch(comm, begin, end, out.emplace_back(zero.sharding.padded_count(begin, end)).data(), own);
            zero.ready(comm, begin, end);
        } else out.emplace_back(own, own + own_count);
        if (own) memory.release(reinterpret_cast<std::byte *>(own), bytes);
    }
    return out;
}

// All parameters by global offset.
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

// Writes this rank's parameters to `out`, as floats by global offset.
template <class Dev> void read_own_floats(Zero<Dev> &zero, std::vector<float> &out) {
    for (size_t b = 0; b < zero.sharding.buckets.size(); b++)
        zero.read_part(b, [&](auto floats, size_t first, size_t n) {
            const Bucket &bucket = zero.sharding.buckets[b];
            for (size_t i = 0; i < n; i++)  // without padding
                if (const size_t at = bucket.own * bucket.part + first + i; at < bucket.count)
                    out[bucket.global + at] = floats.load(i);
        });
}
