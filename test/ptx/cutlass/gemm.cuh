// A persistent, warp-specialised product with TMA and tiles of 128 x 128. Template arguments: type, schedule, blocks per cluster.
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"
#include "gemm.h"

template <class In, class Schedule, class EpilogueSchedule, int cluster> const char *run_gemm(const Gemm &gemm) {
    using namespace cute;
    using Out = cutlass::bfloat16_t;
    using Row = cutlass::layout::RowMajor;
    using Column = cutlass::layout::ColumnMajor;
    using Tile = Shape<_128, _128, Int<128 / sizeof(In)>>;
    using Cluster = Shape<Int<cluster>, _1, _1>;
    constexpr int aligned = 16 / sizeof(In), out_aligned = 8;
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto,
        float, float, Out, Row, out_aligned, Out, Row, out_aligned, EpilogueSchedule>::CollectiveOp;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, In, Row, aligned, In, Column, aligned, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>, Schedule>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, Mainloop, Epilogue>;
    using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    const int m = gemm.m, n = gemm.n, k = gemm.k;
    const auto stride = [](auto kind, int rows, int columns) {
        return cutlass::make_cute_packed_stride(kind, {rows, columns, 1});
    };
    cutlass::KernelHardwareInfo hardware;
    hardware.device_id = 0, hardware.sm_count = 4;  // so that a block computes several tiles
    const typename Device::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                               {m, n, k, 1},
                                               {static_cast<const In *>(gemm.a), stride(typename Kernel::StrideA{}, m, k),
                                                static_cast<const In *>(gemm.b), stride(typename Kernel::StrideB{}, n, k)},
                                               {{gemm.alpha, gemm.beta},
                                                static_cast<const Out *>(gemm.c),
                                                stride(typename Kernel::StrideC{}, m, n),
                                                static_cast<Out *>(gemm.d),
                                                stride(typename Kernel::StrideD{}, m, n)},
                                               hardware};
    Device device;
    cutlass::Status status = device.can_implement(arguments);
    if (status == cutlass::Status::kSuccess) status = device.initialize(arguments);
    if (status == cutlass::Status::kSuccess) status = device.run();
    return status == cutlass::Status::kSuccess ? nullptr : cutlassGetStatusString(status);
}
