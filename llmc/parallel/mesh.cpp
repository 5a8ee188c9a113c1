#include "mesh.h"

#include <unistd.h>

#include "../core/common.h"

void check_divides(const char *flag, int size, int world, int least) {
    if (size > 0 && world % size == 0) return;
    std::string sizes;
    for (int n = least; n <= world; n++)
        if (world % n == 0) sizes += format("%s%d", n > least ? ", " : "", n);
    die("--%s %d does not divide %d rank%s\n  fix: %s", flag, size, world, world == 1 ? "" : "s",
        sizes.empty() ? "leave it out" : ("use one of " + sizes).c_str());
}

static int checked(Comm &world, const char *flag, int size, int least = 1) {
    agree(world, [&] { check_divides(flag, size, world.size, least); });
    return size;
}

// Returns the ranks of this rank's group, or its replicas; null if the world is one group.
static std::unique_ptr<Comm> split_groups(Comm &world, int group, bool replicas) {
    if (group == 0 || checked(world, "zero_group", group, 2) == world.size) return nullptr;
    return world.split(replicas ? world.rank % group : world.rank / group, world.rank);
}

// Returns the `row` neighbours that divide experts or tensors with this rank, or the ranks of its group that hold the same part; null if there is
// nothing to divide.
static std::unique_ptr<Comm> split_row(Comm &world, const char *flag, int row, int group, bool column) {
    if (checked(world, flag, row) == 1) return nullptr;
    return world.split(column ? world.rank / group * row + world.rank % row : world.rank / row, world.rank);
}

// The ranks of a ring are tp ranks apart.
static std::unique_ptr<Comm> split_ring(Comm &world, int sp, int tp) {
    agree(world, [&] {
        check_divides("tensor_parallel", tp, world.size);
        check_divides("ring_attn_size", sp, world.size / tp);
    });
    return world.split(world.rank / (sp * tp) * tp + world.rank % tp, world.rank);
}

Mesh::Mesh(Comm &world, int ring_attn_size, int zero_group, int expert_parallel, int tensor_parallel)
    : all(world),
      ring(split_ring(world, ring_attn_size, tensor_parallel)),
      group(split_groups(world, zero_group, false)),
      replicas(split_groups(world, zero_group, true)),
      experts(split_row(world, "expert_parallel", expert_parallel, zero_group ? zero_group : world.size, false)),
      same_experts(split_row(world, "expert_parallel", expert_parallel, zero_group ? zero_group : world.size, true)),
      tensor(split_row(world, "tensor_parallel", tensor_parallel, zero_group ? zero_group : world.size, false)),
      same_cut(split_row(world, "tensor_parallel", tensor_parallel, zero_group ? zero_group : world.size, true)),
      shards(group ? *group : world, replicas.get(), experts.get(), same_experts.get(), tensor.get(), same_cut.get()),
      dp(world.size / ring_attn_size / tensor_parallel),
      sp(ring_attn_size),
      tp(tensor_parallel),
      dp_rank(world.rank / tp / sp),
      sp_rank(world.rank / tp % sp),
      tp_rank(world.rank % tp) {}

double Mesh::max_of_row(double value) const {
    const double of_ring = ring->max(value);
    return tensor ? tensor->max(of_ring) : of_ring;
}

double Mesh::seconds() const {
    double sum = all.seconds + ring->seconds;
    for (const Comm *comm : {group.get(), replicas.get(), experts.get(), same_experts.get(), tensor.get(), same_cut.get()})
        if (comm) sum += comm->seconds;
    return sum;
}

std::string host_name() {
    char name[256] = "";
    gethostname(name, sizeof(name) - 1);
    return name;
}

std::string ring_across_hosts(const std::vector<std::string> &hosts, int sp) {
    for (size_t r = 0; r < hosts.size(); r++) {
        const size_t first = r / size_t(sp) * size_t(sp);
        if (hosts[r] != hosts[first])
            return format("ranks %zu to %zu share their sequences between the hosts %s and %s: keys and values cross the network",
                          first, first + size_t(sp) - 1, hosts[first].c_str(), hosts[r].c_str());
    }
    return "";
}
