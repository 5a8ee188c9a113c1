// The interpreter's CUtensorMap: an array in device memory, and the box that a copy moves. NVIDIA does not document its 128 bytes.
#pragma once
#include <cstdint>
#include <string>

namespace ptx {

// In the order of CUtensorMapDataType.
enum class Element : uint8_t { u8, u16, u32, s32, u64, s64, f16, f32, f64, bf16, f32_ftz, tf32, tf32_ftz };
uint32_t bytes_of(Element element);

struct TensorMap {
    static constexpr uint64_t mark = 0x70616d2d616d7421;
    static constexpr int most_dimensions = 5;

    uint64_t magic = mark;
    uint64_t of_driver = 0;  // programs clear bit 21 of this word (llmc/ops/hopper.cuh)
    uint64_t base = 0;
    uint64_t dims[most_dimensions] = {};         // elements, the contiguous dimension first
    uint64_t strides[most_dimensions - 1] = {};  // bytes; for the dimensions from the second on
    uint16_t box[most_dimensions] = {};          // elements
    uint8_t rank = 0;
    Element element = Element::u8;
    uint8_t swizzle = 0;  // CUtensorMapSwizzle: 0 none, 1 32 bytes, 2 64, 3 128
    uint8_t unused[19] = {};

    uint32_t row_bytes() const { return uint32_t(box[0]) * bytes_of(element); }
    uint32_t box_bytes() const;
};
static_assert(sizeof(TensorMap) == 128);

// Returns the rule of cuTensorMapEncodeTiled that a map violates, and the fix; empty if it is valid.
std::string broken_rule(const TensorMap &map);

// A swizzle permutes 16-byte words within each row of a group of 8 rows of 32, 64 or 128 bytes: address bits from 4 on ^= address bits from 7 on.
inline uint32_t swizzled(uint32_t address, uint32_t mask) { return address ^ (address >> 7 & mask) << 4; }
}  // namespace ptx
