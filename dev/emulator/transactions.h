// Memory transactions of one load or store of a warp: sectors and wavefronts. The emulator (counts.cpp) and the PTX interpreter both count with these
// functions, so their figures can be compared.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace transactions {

// Returns the number of distinct sectors among `n` sector numbers (address / 32). Afterwards they are at the beginning of the array, sorted.
inline size_t different(uint64_t *sectors, size_t n) {
    std::sort(sectors, sectors + n);
    return size_t(std::unique(sectors, sectors + n) - sectors);
}

struct Wavefronts {
    size_t all;    // with the conflicts of the 32 banks of 4 bytes
    size_t least;  // without bank conflicts
};

// True if each lane has the address of its neighbour, the lane whose number differs in the bit `step`.
inline bool in_pairs(const uint32_t *addresses, uint32_t mask, uint32_t step) {
    for (uint32_t l = 0; l < 32; l++)
        if (mask >> l & mask >> (l ^ step) & 1 && addresses[l] != addresses[l ^ step]) return false;
    return true;
}

// Shared memory serves 128 bytes at a time: a whole warp with 4 bytes per lane, half a warp with 8, a quarter with 16, and twice that number of lanes
// if pairs of neighbours have the same address. Among the lanes served together, different words of one bank take one wavefront each; lanes that
// access the same word share it.
inline Wavefronts wavefronts(const uint32_t *addresses, uint32_t mask, uint32_t bytes) {
    int lanes_at_once = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
    if (bytes > 4 && (in_pairs(addresses, mask, 1) || in_pairs(addresses, mask, 2))) lanes_at_once *= 2;
    std::vector<uint32_t> all, words;
    size_t count = 0;
    for (int first = 0; first < 32; first += lanes_at_once) {
        words.clear();
        for (int l = first; l < first + lanes_at_once; l++)
            for (uint32_t k = 0; mask >> l & 1 && k < std::max(bytes / 4, 1u); k++) words.push_back(addresses[l] / 4 + k);
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        size_t of_bank[32] = {};
        for (uint32_t word : words) of_bank[word % 32]++;
        count += *std::max_element(of_bank, of_bank + 32);
        all.insert(all.end(), words.begin(), words.end());
    }
    std::sort(all.begin(), all.end());
    const size_t different = size_t(std::unique(all.begin(), all.end()) - all.begin());
    return {count, std::min(count, (different + 31) / 32)};
}
}  // namespace transactions
