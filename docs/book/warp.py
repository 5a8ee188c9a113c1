"""What 32 addresses cost: sectors of device memory and wavefronts of shared memory. Chapter C: gpu.md."""

WARP = range(32)
PATTERNS = [  # the loads of a warp: the address of each lane, and the bytes of one load
    ("neighbouring floats", [4 * lane for lane in WARP], 4),
    ("neighbouring bf16", [2 * lane for lane in WARP], 2),
    ("16 bytes a lane", [16 * lane for lane in WARP], 16),
    ("every second float", [8 * lane for lane in WARP], 4),
    ("neighbours, off by one", [4 * lane + 4 for lane in WARP], 4),
    ("rows 4096 bytes apart", [4096 * lane for lane in WARP], 4),
    ("all the same", [0 for _ in WARP], 4),
]


def sectors(addresses, bytes_each):
    """Device memory is read in sectors of 32 bytes; a sector that several lanes touch is read once."""
    return {byte // 32 for a in addresses for byte in (a, a + bytes_each - 1)}


def used(addresses, bytes_each):
    wanted = {byte for a in addresses for byte in range(a, a + bytes_each)}
    return len(wanted) / (32 * len(sectors(addresses, bytes_each)))


def wavefronts(addresses, bytes_each):
    """Shared memory has 32 banks of 4 bytes. Words of one bank wait for each other; lanes that want one word share it. Loads of 8 and 16 bytes
    are answered to halves and quarters of the warp."""
    at_once = {8: 16, 16: 8}.get(bytes_each, 32)
    total = 0
    for first in range(0, 32, at_once):
        words = {a // 4 + k for a in addresses[first:first + at_once] for k in range(max(bytes_each // 4, 1))}
        banks = [word % 32 for word in words]
        total += max(banks.count(bank) for bank in banks)
    return total


def occupancy(threads, registers, shared, registers_of_sm=65536, shared_of_sm=233472, warps_of_sm=64, blocks_of_sm=32):
    """The share of an SM's 64 warps that can live at a time, and what limits it; of an H100 (sm_90)."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256  # registers are given in units of 256
    limits = {"warps": warps_of_sm // warps, "blocks": blocks_of_sm, "registers": registers_of_sm // per_warp // warps,
              "shared memory": shared_of_sm // (shared + 1024)}
    limit = min(limits, key=limits.get)
    return limits[limit] * warps / warps_of_sm, limits[limit], limit


def main():
    print("a warp's load                 bytes  sectors  bytes used  wavefronts in shared memory")
    for name, addresses, size in PATTERNS:
        print(f"  {name:<28}{size:5}{len(sectors(addresses, size)):9}{100 * used(addresses, size):10.0f} %{wavefronts(addresses, size):9}")
    for name, stride in (("a column of rows of 32", 128), ("of rows of 33", 132)):
        print(f"  {name:<28}{4:5}{'':9}{'':12}{wavefronts([stride * lane for lane in WARP], 4):9}")
    print("a block's threads, registers of a thread, shared bytes: share of the warps of an SM")
    for block in [(64, 32, 0), (128, 32, 0), (256, 32, 0), (1024, 32, 0), (128, 40, 0), (128, 128, 0), (128, 250, 81920), (768, 32, 0),
                  (256, 32, 49152)]:
        share, blocks, limit = occupancy(*block)
        print(f"  {block[0]:5} {block[1]:4} {block[2]:6}    {100 * share:4.0f} %   {blocks:2} blocks, by {limit}")


if __name__ == "__main__":
    main()
