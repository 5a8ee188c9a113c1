// Packing decides which samples share a row.
//
// The algorithm is best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", MIT 1973): it takes the longest sample first, and puts
// each into the fullest row that still has room, or else into a new one. It needs at most 11/9 of the fewest possible rows, plus one, and
// takes O(n log n).
#pragma once
#include <cstddef>
#include <span>
#include <vector>

// Returns rows of at most `capacity` tokens; an entry is an index into `lengths`. The result depends on the lengths and their order alone.
// Ties between equal lengths are broken by index, ties between equally full rows by the order of opening.
std::vector<std::vector<size_t>> pack_best_fit(std::span<const size_t> lengths, size_t capacity);
