// Counts of a single launch, for tests.
#pragma once
#include <gtest/gtest.h>

#include <utility>

#include "../../../dev/emulator/ptx/runtime.h"

// The one launch of a kernel with a grid that no other test has.
template <class F> ptx::Launches counted(const std::string &kernel, ptx::Extent grid, F run) {
    const bool before = std::exchange(ptx::counting, true);
    run();
    ptx::counting = before;
    ptx::Launches found;
    for (const ptx::Launches &l : ptx::launched())
        if (l.name == kernel && l.launch.grid == grid) found = l;
    EXPECT_EQ(found.launches, 1u) << kernel;
    return found;
}
inline uint64_t executed(const ptx::Launches &l, ptx::Pipe pipe) { return l.by_pipe[size_t(pipe)].executed; }
