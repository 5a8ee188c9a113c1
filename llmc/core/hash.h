// Checksums of bytes: 64 bits in hex, by XXH3 (https://xxhash.com). They detect changes and damage, but do not withstand an attacker.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

uint64_t hash_number(const void *data, size_t bytes, uint64_t seed = 0);
std::string hash_of(const void *data, size_t bytes);  // "0123456789abcdef"
inline std::string hash_of(const std::string &text) { return hash_of(text.data(), text.size()); }
