#include "hash.h"

#define XXH_INLINE_ALL
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // in g++ 12's own AVX-512 intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <xxhash.h>
#pragma GCC diagnostic pop

#include "common.h"

std::string hash_of(const void *data, size_t bytes) { return format("%016llx", (unsigned long long)XXH3_64bits(data, bytes)); }
