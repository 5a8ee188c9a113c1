// The grid of ranks: world = dp x sp. Ranks of one ring (sp) share every packed row; rings (dp) take different rows.
//
//   rank = dp_rank * sp + sp_rank
//
// so that neighbours in a ring are neighbours in the world, which launchers put on one host. Data depend on dp_rank alone.
//
// The optimizer's shards (zero.h) are divided among the ranks of a group, which are also consecutive. There may be several groups, with replicas of each
// other's shards: hybrid sharding (Zhao et al., "PyTorch FSDP", 2023, arXiv:2304.11277, section 3.2.2).
//
// Under expert parallelism consecutive ranks, too, divide the experts of each layer, and each group of shards has whole rows of them. The ranks of a
// column, which have the same experts, divide and sum these as the ranks of a group do all else.
#pragma once
#include <memory>

#include "comm.h"

// Bytes that a rank has sent: activations for attention (K and V; under ulysses Q, out and dout, too), gradients of these, gradients of
// parameters, updated parameters, and rows of tokens, and of their gradients, to experts and back.
struct Payload {
    size_t kv = 0, dkv = 0, grads = 0, params = 0, experts = 0;
    Payload &operator+=(const Payload &o) {
        return kv += o.kv, dkv += o.dkv, grads += o.grads, params += o.params, experts += o.experts, *this;
    }
};

// The ranks among which shards are divided, and gradients are summed.
struct ShardRanks {
    Comm &group;     // together they have each parameter once
    Comm *replicas;  // the ranks that have the same part in other groups, in the order of groups; null: there is one group
    // The ranks that divide the experts, and the ranks of the group that have the same ones; null: every rank has all experts.
    Comm *experts, *same_experts;

    ShardRanks(Comm &group, Comm *replicas = nullptr, Comm *experts = nullptr, Comm *same_experts = nullptr)
        : group(group), replicas(replicas), experts(experts), same_experts(same_experts) {}

    Comm &of(bool divided_experts) const { return divided_experts ? *same_experts : group; }  // the ranks that share a bucket

    size_t rank() const {  // in the world
        return size_t(group.rank) + (replicas ? size_t(replicas->rank) * size_t(group.size) : 0);
    }
};

struct Mesh {
    Comm &all;                                          // the world
    const std::unique_ptr<Comm> ring;                   // the ranks that share this rank's rows
    const std::unique_ptr<Comm> group, replicas;        // of `shards`; null: the world is one group
    const std::unique_ptr<Comm> experts, same_experts;  // of `shards`; null: no expert parallelism
    const ShardRanks shards;
    const int dp, sp, dp_rank, sp_rank;

    // ring_attn_size is sp; zero_group is the number of ranks of a group, 0: all; expert_parallel that of a row of experts. Every rank calls it.
    Mesh(Comm &world, int ring_attn_size, int zero_group = 0, int expert_parallel = 1);

    double seconds() const;  // the time that this rank has spent in all of them
};

// Dies unless the flag's value divides the number of ranks. The values that do, from the least sensible one on, are in the message.
void check_divides(const char *flag, int size, int world, int least = 1);

std::string host_name();

// hosts[r] is the host of rank r. Returns a note about a ring that spans several hosts, so that its keys cross the network; "" if none does.
std::string ring_across_hosts(const std::vector<std::string> &hosts, int sp);
