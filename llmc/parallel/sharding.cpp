#include "sharding.h"

#include <algorithm>
#include <numeric>

#include "../core/common.h"

Sharding::Sharding(const std::vector<Unit> &units, int stage, int world, int rank, size_t bucket_bytes, size_t aligned, bool away,
                   size_t expert_ranks, size_t tensor_ranks)
    : stage(world == 1 ? 0 : stage),
      parts(this->stage ? size_t(world) : 1),
      own(this->stage ? size_t(rank) : 0),
      expert_ranks(expert_ranks),
      expert_own(size_t(rank) % expert_ranks),
      tensor_ranks(tensor_ranks),
      tensor_own(size_t(rank) % tensor_ranks),
      aligned(aligned),
      divided(this->stage == 3 || (this->stage > 0 && away)) {
    const auto add = [&](Bucket b) {
        b.part = ceil_div(b.count, b.parts * aligned) * aligned, b.begin = count, b.shard = shard_count;
        buckets.push_back(b);
        count += b.padded(), shard_count += b.part;
        largest = std::max(largest, b.padded()), largest_part = std::max(largest_part, b.part);
    };
    const auto bucket = [&](size_t global, size_t elements, Holders holders, size_t range) {
        const size_t divide = holders == Holders::same_experts ? expert_ranks : holders == Holders::same_cut ? tensor_ranks : 1;
        add({.global = global,
             .count = elements,
             .parts = this->stage ? parts / divide : 1,
             .own = this->stage ? own / divide : 0,
             .holders = holders,
             .range = range});
    };
    size_t end = 0;
    for (const Unit &unit : units) {
        if (unit.begin != end) die("a unit begins at element %zu, but the one before it ends at %zu", unit.begin, end);
        end = unit.end;
        unit_begins.push_back(shard_count);
        size_t most = unit.end - unit.begin;
        count = round_up(count, unit_aligned);
        if (unit.row_elements) {  // only the unit's last bucket has padding, so that tensors stay contiguous
            const size_t step = std::lcm(unit.row_elements, multiple());
            most = std::max<size_t>(1, bucket_bytes / sizeof(float) / step) * step;
        }
        size_t first = unit.begin;
        for (size_t range_end : expert_ranks > 1 ? unit.experts : std::vector<size_t>()) {
            const size_t n = (range_end - first) / expert_ranks;
            bucket(first + expert_own * n, n, Holders::same_experts, first);
            first = range_end;
        }
        const auto add_range = [&](size_t range_end, Holders holders) {
            for (; first < range_end; first = std::min(range_end, first + most))
                bucket(first, std::min(most, range_end - first), holders, first);
        };
        for (const auto &[cut_begin, cut_end] : unit.cut)
            add_range(cut_begin, Holders::all), add_range(cut_end, Holders::same_cut);
        add_range(unit.end, Holders::all);
    }
    elements = end;
    unit_begins.push_back(shard_count);
}

size_t Sharding::bucket_of(size_t global) const {
    const auto next = std::upper_bound(buckets.begin(), buckets.end(), global,
                                       [](size_t element, const Bucket &b) { return element < b.range; });
    return size_t(next - buckets.begin()) - 1;
}

size_t Sharding::flat(size_t global) const {
    const Bucket &bucket = buckets[bucket_of(global)];
    return std::max(global, bucket.global) - bucket.global + bucket.begin;
}

size_t Sharding::padded_count(size_t begin, size_t end) const {
    size_t count = 0;
    for (size_t b = bucket_of(begin); b <= bucket_of(end - 1); b++) count += buckets[b].padded();
    return count;
}

std::vector<Tensor> Sharding::padded(std::vector<Tensor> table) const {
    std::erase_if(table, [&](const Tensor &t) {
        const Bucket &b = buckets[bucket_of(t.offset)];
        return t.offset < b.global || t.offset >= b.global + b.count;
    });
    for (Tensor &t : table) {
        const size_t begin = flat(t.offset);
        if (flat(t.offset + t.count - 1) != begin + t.count - 1) die("a unit ends inside %s", t.name.c_str());
        t.offset = begin;
    }
    return table;
}

std::vector<ShardRun> Sharding::shard_runs() const {
    std::vector<ShardRun> out;
    for (const Bucket &b : buckets) {
        const size_t first = b.own * b.part;
        if (first < b.count) out.push_back({b.global + first, b.begin + first, b.shard, std::min(b.part, b.count - first)});
    }
    return out;
}

std::vector<TensorRun> Sharding::tensor_runs(const std::vector<Tensor> &padded_table) const {
    std::vector<TensorRun> out;
    for (const ShardRun &s : shard_runs())
        for (size_t i = 0; i < padded_table.size(); i++) {
            const Tensor &t = padded_table[i];
            const size_t from = std::max(t.offset, s.flat), to = std::min(t.offset + t.count, s.flat + s.count);
            const size_t skipped = from - s.flat;
            const size_t global = s.global + skipped, first = from - t.offset;
            if (from < to)
                out.push_back(
                    {{global, from, s.shard + skipped, to - from}, i, first, tensor_ranks > 1 ? t.number + first : global});
        }
    return out;
}

std::vector<UpdateRun> Sharding::update_runs(const std::vector<Tensor> &padded_table) const {
    std::vector<UpdateRun> out;
    for (const TensorRun &s : tensor_runs(padded_table)) {
        const bool decay = padded_table[s.tensor].decay, of_layer = padded_table[s.tensor].of_layer;
        const Holders holders = buckets[bucket_of(s.global)].holders;
        const UpdateRun *const last = out.empty() ? nullptr : &out.back();
        const bool goes_on = last && last->decay == decay && last->of_layer == of_layer && last->holders == holders &&
                             last->global + last->count == s.global && last->flat + last->count == s.flat &&
                             last->shard + last->count == s.shard && last->number + last->count == s.number;
        if (goes_on) out.back().count += s.count;
        else out.push_back({s, s.number, decay, of_layer, holders});
    }
    return out;
}
