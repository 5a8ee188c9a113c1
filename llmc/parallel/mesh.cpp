#include "mesh.h"

#include <unistd.h>

#include "../core/common.h"

void check_ring_size(int sp, int world) {
    if (sp > 0 && world % sp == 0) return;
    std::string sizes;
    for (int size = 1; size <= world; size++)
        if (world % size == 0) sizes += format("%s%d", size > 1 ? ", " : "", size);
    die("--ring_attn_size %d does not divide %d ranks\n  fix: one of %s", sp, world, sizes.c_str());
}

static int checked(Comm &world, int sp) {
    agree(world, [&] { check_ring_size(sp, world.size); });
    return sp;
}

Mesh::Mesh(Comm &world, int ring_attn_size)
    : all(world),
      ring(world.split(world.rank / checked(world, ring_attn_size), world.rank)),
      dp(world.size / ring_attn_size),
      sp(ring_attn_size),
      dp_rank(world.rank / sp),
      sp_rank(world.rank % sp) {}

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
