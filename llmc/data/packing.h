// Packing assigns samples to rows.
//
// The algorithm is best-fit decreasing (Johnson, "Near-optimal bin packing algorithms", MIT 1973): it processes samples from the longest to the
// shortest, and puts each into the fullest row with room, or else into a new row. It needs at most 11/9 of the fewest possible rows, plus one, and
// O(n log n) time.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

// Returns rows of at most `capacity` tokens; an entry is an index into `lengths`. The result only depends on the lengths and their order.
// Ties between equal lengths are broken by index, ties between equally full rows by the order of opening.
std::vector<std::vector<size_t>> pack_best_fit(std::span<const size_t> lengths, size_t capacity);
