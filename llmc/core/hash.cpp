#include "hash.h"

#define XXH_INLINE_ALL
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"  // clang does not know the next option
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"     // g++ 12 warns about its own AVX-512 intrinsics
#include <xxhash.h>
#pragma GCC diagnostic pop

#include "common.h"

uint64_t hash_number(const void *data, size_t bytes, uint64_t seed) { return XXH3_64bits_withSeed(data, bytes, seed); }

std::string hash_of(const void *data, size_t bytes) {
    return format("%016llx", static_cast<unsigned long long>(hash_number(data, bytes)));
}
