// The grid of ranks: world = dp x sp x tp. Ranks of one ring (sp) share every packed row, of which each has its own tokens. Ranks of one tensor group
// (tp) have the same tokens, and divide the layers' heads and hidden channels among them. Data ranks (dp) take different rows.
//
//   rank = (dp_rank * sp + sp_rank) * tp + tp_rank
//
// so ranks that exchange more are closer neighbours in the world, which launchers place on one host. The data depend on dp_rank alone.
//
// The ranks of a group, which are consecutive, divide the optimizer's shards (zero.h). There may be several groups that replicate each other's
// shards: hybrid sharding (Zhao et al., "PyTorch FSDP", 2023, arXiv:2304.11277, section 3.2.2).
//
// Under expert parallelism expert_parallel consecutive ranks divide the experts of each layer, and a group consists of whole such sets. The ranks of
// a group that hold the same experts shard these experts among themselves, as all ranks of the group shard the other parameters. Under tensor
// parallelism the same holds for the ranks of a group that have the same part of the tensors that are cut (../io/tensor.h).
#pragma once
#include <memory>

#include "comm.h"

// Bytes that a rank has sent, by kind: activations for attention (K and V; under ulysses also Q, out and dout), their gradients, gradients of
// parameters, updated parameters, the rows that travel to experts and back (tokens and gradients), and what tensor parallelism sends.
struct Payload {
    size_t kv = 0, dkv = 0, grads = 0, params = 0, experts = 0, tensor = 0;
    Payload &operator+=(const Payload &o) {
        return kv += o.kv, dkv += o.dkv, grads += o.grads, params += o.params, experts += o.experts, tensor += o.tensor, *this;
    }
};

// The ranks that hold the same elements of a bucket: all ranks; those with the same experts; those with the same part of cut tensors.
enum class Holders { all, same_experts, same_cut };

// The ranks among which shards are divided, and gradients are summed.
struct ShardRanks {
    Comm &group;     // its ranks together hold each parameter once
    Comm *replicas;  // the ranks with the same part in other groups, in the order of groups; null if there is one group
    // The ranks that divide the experts; the ranks of the group that hold the same experts. Null if every rank holds all experts.
    Comm *experts, *same_experts;
    // The ranks that divide tensors; the ranks of the group that have the same part of them. Null without tensor parallelism.
    Comm *tensor, *same_cut;

    ShardRanks(Comm &group, Comm *replicas = nullptr, Comm *experts = nullptr, Comm *same_experts = nullptr,
               Comm *tensor = nullptr, Comm *same_cut = nullptr)
        : group(group), replicas(replicas), experts(experts), same_experts(same_experts), tensor(tensor), same_cut(same_cut) {}

    Comm &of(Holders holders) const {  // the ranks that share a bucket
        return holders == Holders::same_experts ? *same_experts : holders == Holders::same_cut ? *same_cut : group;
    }
    // The ranks that together have all elements of such buckets; null if every rank has them.
    Comm *dividing(Holders holders) const {
        return holders == Holders::same_experts ? experts : holders == Holders::same_cut ? tensor : nullptr;
    }

    size_t rank() const {  // in the world
        return size_t(group.rank) + (replicas ? size_t(replicas->rank) * size_t(group.size) : 0);
    }
};

struct Mesh {
    Comm &all;                                          // the world
    const std::unique_ptr<Comm> ring;                   // the ranks that share this rank's rows
    const std::unique_ptr<Comm> group, replicas;        // for `shards`; null if the world is one group
    const std::unique_ptr<Comm> experts, same_experts;  // for `shards`; null without expert parallelism
    const std::unique_ptr<Comm> tensor, same_cut;       // for `shards`; null without tensor parallelism
    const ShardRanks shards;
    const int dp, sp, tp, dp_rank, sp_rank, tp_rank;

    // ring_attn_size: ranks of a ring (sp). zero_group: ranks of a group; 0 means all. expert_parallel: ranks that divide the experts.
    // tensor_parallel: ranks of a tensor group (tp). Every rank calls this constructor.
    Mesh(Comm &world, int ring_attn_size, int zero_group = 0, int expert_parallel = 1, int tensor_parallel = 1);

    bool is_first_of_row() const { return sp_rank == 0 && tp_rank == 0; }  // of the ranks that share a row, and so its results
    double max_of_row(double value) const;                                 // over these ranks

    double seconds() const;  // time that this rank has spent in all these communicators
};

// Dies unless the flag's value divides the number of ranks. The message lists the divisors from `least` on.
void check_divides(const char *flag, int size, int world, int least = 1);

std::string host_name();

// hosts[r] is the host of rank r. Returns a note if a ring spans several hosts, because its keys then cross the network; otherwise "".
std::string ring_across_hosts(const std::vector<std::string> &hosts, int sp);
