// The grid of ranks: world = dp x sp. Ranks of one ring (sp) share every packed row; rings (dp) take different rows.
//
//   rank = dp_rank * sp + sp_rank
//
// so that neighbours in a ring are neighbours in the world, which launchers put on one host. Data depend on dp_rank alone.
#pragma once
#include <memory>

#include "comm.h"

struct Mesh {
    Comm &all;                         // the world, among which gradients are summed and optimizer shards divided
    const std::unique_ptr<Comm> ring;  // the ranks that share this rank's rows
    const int dp, sp, dp_rank, sp_rank;

    // ring_attn_size is sp. Every rank calls it.
    Mesh(Comm &world, int ring_attn_size);

    double seconds() const { return all.seconds + ring->seconds; }  // the time that this rank has spent in both
};

void check_ring_size(int sp, int world);  // dies unless sp divides world

std::string host_name();

// hosts[r] is the host of rank r. Returns a note about a ring that spans several hosts, so that its keys cross the network; "" if none does.
std::string ring_across_hosts(const std::vector<std::string> &hosts, int sp);
