// HMAC-SHA-256 (RFC 2104, FIPS 180-4): proves knowledge of a secret without revealing it.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

using Digest = std::array<uint8_t, 32>;
Digest sha256(std::string_view data);
Digest hmac_sha256(std::string_view secret, std::string_view message);
bool same_digest(const Digest &a, const Digest &b);  // in constant time
