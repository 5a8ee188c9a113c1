// The matrices of a frozen model's layers in 4 or 8 bits (../ops/dequantise.h). They are quantised during loading, one tensor at a time, so the float
// model is never in memory as a whole, and stay quantised. Each tensor of the model's files is quantised separately, even if several form one matrix.
//
// Under tensor parallelism a tensor is quantised whole, and a rank keeps its part, which consists of whole blocks (cannot_divide): so no bit depends on
// the number of ranks.
//
// Before a layer's weights are read, ready() dequantises them to X, into an array that all layers share: once for the forward pass, and once for the
// backward pass with its recomputation. So all products equal those of a model with the dequantised values.
#pragma once
#include "../core/arena.h"
#include "../io/hf.h"
#include "../ops/quantise.h"
#include "config.h"
#include "parameters.h"
#include "table.h"

template <class Dev> class QuantisedLayers {
  public:
    using X = typename Dev::X;

    // base: the table of the frozen model. Without config.weight_bits no tensor is quantised.
    QuantisedLayers(Dev dev, const ModelConfig &config, const Table &base)
        : matrices(base, [&](const Tensor &t, size_t unit) { return is_quantised(config, t, unit); }),
          others(base, [&](const Tensor &t, size_t unit) { return !is_quantised(config, t, unit); }),
          dev_(dev),
          bits_(config.weight_bits) {}

    const TablePart matrices, others;

    bool any() const { return bits_ > 0; }

    void plan(Plan &plan) {
        size_t codes = 0, magnitudes = 0, scales = 0;
        for (const Tensor &t : matrices.table.tensors) {
            const QuantisedSizes s = sizes_of(t);
            codes += room(s.codes), magnitudes += s.magnitudes, scales += s.scales;
        }
        plan.add(&codes_, format("weights in %d bits", bits_), {codes});
        plan.add(&magnitudes_, "weights, magnitudes of blocks", {magnitudes});
        plan.add(&scales_, "weights, scales", {scales});
        plan.add(&fractions_, "fractions of scales", {Fractions::count});
    }
    void plan_layer(Plan &plan) {
        size_t largest = 0;
        for (size_t unit = 0; unit < matrices.table.units.size(); unit++) largest = std::max(largest, weights(unit));
        plan.transient(&layer_, "weights of a layer", {largest});
    }

    // Returns the address of a tensor, given its offset in the base's table, while its layer is ready; null if it is not quantised.
    X *find(size_t unit, size_t offset) const {
        const auto found = matrices.offsets.find(offset);
        return found == matrices.offsets.end() ? nullptr : layer_ + (found->second - matrices.table.units[unit].begin);
    }

    // Sets the pointers to each tensor's codes; called when the arrays have their addresses.
    void point() {
        size_t codes = 0, magnitudes = 0, scales = 0;
        for (const Tensor &t : matrices.table.tensors) {
            const QuantisedSizes s = sizes_of(t);
            const Quantised q{bits_,     t.shape[0], t.shape[1], codes_ + codes, magnitudes_ + magnitudes, scales_ + scales,
                              fractions_};
            codes += room(s.codes), magnitudes += s.magnitudes, scales += s.scales;
            if (bits_ == 8 || t.cut.dim != 0) {
                parts_.push_back({t.offset, q});
                if (bits_ == 4 && t.cut.dim == 1)
                    parts_.back().q.number = {t.cut.first / nf4_block, t.shape[1] / nf4_block, t.cut.whole / nf4_block};
                continue;
            }
            t.for_runs(0, t.count, [&](size_t begin, size_t at, size_t run) {
                Quantised &part = parts_.emplace_back(Part{t.offset + at, q}).q;
                part.rows = run / t.shape[1], part.number = {begin / nf4_block};
                part.codes += at / 2, part.magnitudes += at / nf4_block;
            });
        }
    }

    void load(const HfWeights &weights, Memory &memory) {
        const float *const of = fractions(true).of;
        write(memory, fractions_, std::vector<float>(of, of + Fractions::count));
        size_t codes = 0, magnitudes = 0, scales = 0;
        for (const Tensor &t : matrices.table.tensors) {
            const Tensor whole = uncut(t);
            std::vector<X> w(whole.count);
            HostMemory host;
            load_part(weights, whole, 0, whole.count, 0, w.data(), host);
            const QuantisedArrays q = part_of(t, quantise(bits_, w, whole.shape[1]));
            write(memory, codes_ + codes, q.codes), write(memory, magnitudes_ + magnitudes, q.magnitudes),
                write(memory, scales_ + scales, q.scales);
            codes += room(q.codes.size()), magnitudes += q.magnitudes.size(), scales += q.scales.size();
        }
    }

    size_t weights(size_t unit) const {  // number of quantised weights in the unit
        if (!any()) return 0;
        return matrices.table.units[unit].end - matrices.table.units[unit].begin;
    }

    // Dequantises the weights of a unit, and overwrites the previous layer's.
    void ready(size_t unit) {
        const Unit &u = matrices.table.units[unit];
        for (const Part &part : parts_)
            if (u.begin <= part.offset && part.offset < u.end) dequantise(dev_, layer_ + (part.offset - u.begin), part.q);
    }

  private:
    static bool is_quantised(const ModelConfig &config, const Tensor &t, size_t unit) {
        return config.weight_bits && unit >= 1 && unit <= config.L && t.of_layer;
    }
    QuantisedSizes sizes_of(const Tensor &t) const {
        QuantisedSizes sizes(bits_, t.shape[0], t.shape[1]);
        if (bits_ == 4) sizes.scales = QuantisedSizes(bits_, t.whole_shape()[0], t.whole_shape()[1]).scales;
        return sizes;
    }
    // Returns the rank's part of a whole tensor.
    QuantisedArrays part_of(const Tensor &t, const QuantisedArrays &whole) const {
        if (t.cut.dim < 0) return whole;
        QuantisedArrays part;
        const auto append = [](auto &to, const auto &from, size_t begin, size_t n) {
            to.insert(to.end(), from.begin() + ptrdiff_t(begin), from.begin() + ptrdiff_t(begin + n));
        };
        const size_t per_code = bits_ == 4 ? 2 : 1;
        t.for_runs(0, t.count, [&](size_t begin, size_t, size_t run) {
            append(part.codes, whole.codes, begin / per_code, run / per_code);
            if (bits_ == 4) append(part.magnitudes, whole.magnitudes, begin / nf4_block, run / nf4_block);
        });
        if (bits_ == 4 || t.cut.dim == 1) part.scales = whole.scales;
        else t.cut.for_sections(t.shape[0], [&](size_t begin, size_t, size_t n) { append(part.scales, whole.scales, begin, n); });
        return part;
    }
    static size_t room(size_t codes) { return round_up(codes, 16); }  // aligns loads of 16 bytes

    const Dev dev_;
    const int bits_;
    uint8_t *codes_, *magnitudes_;  // of all tensors, in order
    float *scales_;
    float *fractions_;  // (256)
    X *layer_;          // (the largest layer)
    struct Part {
        size_t offset;  // of its first element in the table of the matrices
        Quantised q;
    };
    std::vector<Part> parts_;  // one per tensor, or per run of rows of a cut tensor
};
