// What one load or store of a warp asks of the memory: the units in which a GPU serves it. The emulator (counts.cpp) and the PTX interpreter count
// with these functions, so that their figures can be compared.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace transactions {

// Number of different 32-byte sectors among `n` addresses / 32, which it sorts; the first ones are then the sectors.
inline size_t different(uint64_t *sectors, size_t n) {
    std::sort(sectors, sectors + n);
    return size_t(std::unique(sectors, sectors + n) - sectors);
}

struct Wavefronts {
    size_t all;    // as the 32 banks of 4 bytes allow
    size_t least;  // if no two words met in a bank
};

// Whether each lane wants what its neighbour does, the lane whose number differs in the bit `step`.
inline bool in_pairs(const uint32_t *addresses, uint32_t mask, uint32_t step) {
    for (uint32_t l = 0; l < 32; l++)
        if (mask >> l & mask >> (l ^ step) & 1 && addresses[l] != addresses[l ^ step]) return false;
    return true;
}

// Shared memory answers 128 bytes at a time: to 32 lanes with 4 bytes each, to halves of the warp with 8, and to quarters with 16; twice as many
// lanes if they want the same in pairs. Of those that are answered at once words of one bank wait for each other; lanes that want the same word
// share it.
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
