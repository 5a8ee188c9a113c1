#include "counts.h"

#include <bit>
#include <utility>

#include "transactions.h"

void KernelCounts::operator+=(const KernelCounts &other) {
    loads += other.loads, stores += other.stores, shared_loads += other.shared_loads, shared_stores += other.shared_stores;
    sectors += other.sectors, wavefronts += other.wavefronts, least_wavefronts += other.least_wavefronts,
        barriers += other.barriers;
    for (const auto &[name, x] : other.operations) operations[name] += x;
}

namespace CUDA_BACKEND::simt {
void BlockCounts::start(size_t warps) { warps_ = warps; }

void BlockCounts::access(const Access &a, int warp, int lane, unsigned lanes_of_warp) {
    Site &site = sites_[a.shared].try_emplace(a.pc, Site{a.shared, a.write, {}}).first->second;
    if (site.warps.size() < warps_) site.warps.resize(warps_);
    OfWarp &w = site.warps[size_t(warp)];
    const size_t n = w.executed[size_t(lane)]++ - w.first;
    if (n >= w.open.size()) w.open.resize(n + 1);
    Request &request = w.open[n];
    request.lanes |= 1u << lane;
    request.bytes = a.bytes;
    request.address[size_t(lane)] = a.address;
    for (; !w.open.empty() && w.open.front().lanes == lanes_of_warp; w.first++) {
        complete(site, w.open.front());
        w.open.pop_front();
    }
}

void BlockCounts::operation(const char *name, int lanes) { counts_.operations[name] += {1, uint64_t(lanes)}; }

void BlockCounts::complete(const Site &site, const Request &request) {
    KernelCounts::Executed &executed = site.shared  ? site.write ? counts_.shared_stores : counts_.shared_loads
                                       : site.write ? counts_.stores
                                                    : counts_.loads;
    executed += {1, uint64_t(std::popcount(request.lanes))};
    if (site.shared) {
        uint32_t offsets[32];
        for (size_t l = 0; l < 32; l++) offsets[l] = uint32_t(request.address[l]);
        const auto [all, least] = transactions::wavefronts(offsets, request.lanes, request.bytes);
        counts_.wavefronts += all, counts_.least_wavefronts += least;
        return;
    }
    std::vector<uint64_t> sectors;
    for (unsigned set = request.lanes; set; set &= set - 1) {
        const uint64_t begin = request.address[size_t(std::countr_zero(set))];
        for (uint64_t s = begin / 32; s <= (begin + request.bytes - 1) / 32; s++) sectors.push_back(s);
    }
    counts_.sectors += transactions::different(sectors.data(), sectors.size());
}

void BlockCounts::end_block() {
    for (auto &sites : sites_)
        for (auto &[pc, site] : sites)
            for (OfWarp &w : site.warps) {
                for (const Request &request : w.open)
                    if (request.lanes) complete(site, request);
                w = {};
            }
}

KernelCounts BlockCounts::take() {
    sites_[0].clear(), sites_[1].clear();
    return std::exchange(counts_, {});
}
}  // namespace CUDA_BACKEND::simt
