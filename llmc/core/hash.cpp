#include "hash.h"

#define XXH_INLINE_ALL
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // in g++ 12's own AVX-512 intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <xxhash.h>
#pragma GCC diagnostic pop

#include "common.h"

uint64_t hash_number(const void *data, size_t bytes, uint64_t seed) { return XXH3_64bits_withSeed(data, bytes, seed); }

std::string hash_of(const void *data, size_t bytes) {
    return format("%016llx", static_cast<unsigned long long>(hash_number(data, bytes)));
}
