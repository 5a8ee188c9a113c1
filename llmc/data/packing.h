// Packing: which samples share a row.
//
// Best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", MIT 1973): longest sample first, each into the fullest row
// that still has room, else into a new one. It needs at most 11/9 of the fewest possible rows, plus one. O(n log n).
#pragma once
#include <cstddef>
#include <span>
#include <vector>

// Rows of at most `capacity` tokens; an entry is an index into `lengths`. Depends on the lengths and their order alone: equal
// lengths go in order of index, equally full rows in order of opening.
std::vector<std::vector<size_t>> pack_best_fit(std::span<const size_t> lengths, size_t capacity);
