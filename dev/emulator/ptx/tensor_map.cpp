#include "tensor_map.h"

#include "../../../llmc/core/common.h"

namespace ptx {

uint32_t bytes_of(Element element) {
    constexpr uint8_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    return bytes[size_t(element)];
}

uint32_t TensorMap::box_bytes() const {
    uint32_t all = bytes_of(element);
    for (int d = 0; d < rank; d++) all *= box[d];
    return all;
}

// Rules of the CUDA Driver API, "Tensor Map Object Management".
std::string broken_rule(const TensorMap &map) {
    if (map.rank < 1 || map.rank > TensorMap::most_dimensions) return format("%d dimensions\n  fix: 1 to 5", map.rank);
    if (!map.base || map.base % 16) return format("the array at %#zx\n  fix: use an address aligned to 16", size_t(map.base));
    for (int d = 0; d < map.rank; d++) {
        if (map.dims[d] < 1 || map.dims[d] > uint64_t(1) << 32)
            return format("%zu elements in dimension %d\n  fix: 1 to 2^32", size_t(map.dims[d]), d);
        if (map.box[d] < 1 || map.box[d] > 256)
            return format("a box of %d elements in dimension %d\n  fix: 1 to 256", map.box[d], d);
    }
    for (int d = 0; d + 1 < map.rank; d++)
        if (map.strides[d] % 16 || map.strides[d] >= uint64_t(1) << 40)
            return format("a stride of %zu bytes in dimension %d\n  fix: use a multiple of 16 below 2^40", size_t(map.strides[d]),
                          d + 1);
    if (map.row_bytes() % 16) return format("a box of %u bytes a row\n  fix: use a multiple of 16", map.row_bytes());
    if (map.swizzle > 3) return format("the swizzle %d\n  fix: none, or 32, 64 or 128 bytes", map.swizzle);
    if (const uint32_t span = 16u << map.swizzle; map.swizzle && map.row_bytes() > span)
        return format("a box of %u bytes a row with a swizzle of %u\n  fix: at most the swizzle's", map.row_bytes(), span);
    return "";
}
}  // namespace ptx
