#include "packing.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "../core/common.h"

std::vector<std::vector<size_t>> pack_best_fit(std::span<const size_t> lengths, size_t capacity) {
    std::vector<size_t> longest_first(lengths.size());
    std::iota(longest_first.begin(), longest_first.end(), size_t(0));
    std::stable_sort(longest_first.begin(), longest_first.end(), [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });

    std::vector<std::vector<size_t>> rows;
    std::set<std::pair<size_t, size_t>> open;  // (free tokens, row)
    for (size_t i : longest_first) {
        const size_t length = lengths[i];
        if (length > capacity)
            die("sample %zu has %zu tokens but a row holds %zu\n  fix: --row_tokens %zu, or prepare the data again with "
                "--max_len %zu and --truncation",
                i, length, capacity, length, capacity);
        const auto fit = open.lower_bound({length, 0});
        if (fit == open.end()) {
            open.insert({capacity - length, rows.size()});
            rows.push_back({i});
        } else {
            const auto [free, row] = *fit;
            open.erase(fit);
            open.insert({free - length, row});
            rows[row].push_back(i);
        }
    }
    return rows;
}
