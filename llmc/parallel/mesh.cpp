#include "mesh.h"

#include <unistd.h>

#include "../core/common.h"

static int checked(Comm &world, int sp) {
    std::string sizes;
    for (int size = 1; size <= world.size; size++)
        if (world.size % size == 0) sizes += format("%s%d", size > 1 ? ", " : "", size);
    agree(world, [&] {
        if (sp < 1 || world.size % sp)
            die("--ring_attn_size %d does not divide %d ranks\n  fix: one of %s", sp, world.size, sizes.c_str());
    });
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
