// All parameters of a model as flat arrays in the order of its parameter table: weights, float master weights, gradients, AdamW's
// moments. Loading, initialising, exporting, clipping and updating walk the table; nothing else lists tensors.
#pragma once
#include <cmath>

#include "../core/common.h"
#include "../core/mutant.h"
#include "../core/rng.h"
#include "../io/hf.h"
#include "../ops/layout.h"
#include "../ops/reduce.h"
#include "model.h"

template <class Dev> struct Parameters {
    using X = typename Dev::X;
    Dev dev;
    std::vector<Tensor> table;
    size_t count = 0;                  // elements of all tensors
    X *params = nullptr;               // (count)
    float *master = nullptr;           // (count) what AdamW updates; in f32 the parameters themselves. Null unless training
    float *grads = nullptr;            // (count)
    float *m = nullptr, *v = nullptr;  // (count)
    double *norm_scratch = nullptr;    // squared_norm_scratch

    Parameters(Dev dev, std::vector<Tensor> tensors) : dev(dev), table(std::move(tensors)) {
        for (const Tensor &t : table) count += t.count;
    }

    void plan(Plan &plan, bool training) {
        plan.add(&params, "params", {count});
        if (!training) return;
        if constexpr (sizeof(X) == sizeof(float)) plan.alias(&master, &params);
        else plan.add(&master, "master weights", {count});
        plan.add(&grads, "gradients", {count});
        plan.add(&m, "adamw m", {count});
        plan.add(&v, "adamw v", {count});
        plan.add(&norm_scratch, "gradient norm scratch", {squared_norm_scratch(count)});
    }

    Memory &memory() {  // made when it is first used: a plan needs no device
        if (!memory_) memory_ = make_memory(dev);
        return *memory_;
    }

    void load(const HfWeights &weights) {
        for (const Tensor &t : table) {
            if (master) weights.read(t.name, t.shape, master + t.offset, memory());
            else weights.read(t.name, t.shape, params + t.offset, memory());
        }
        if (master) round_master();
    }

    void initialise(uint64_t seed, double deviation) {
        std::vector<float> part;
        for (const Tensor &t : table) {
            const Random random{seed, Purpose::init, stream_of(t.name)};
            in_parts(t.count, [&](size_t first, size_t n) {
                part.resize(n);
#pragma omp parallel for
                for (size_t i = 0; i < n; i++)
                    part[i] = t.init == Tensor::normal ? float(deviation * random.normal(first + i)) : t.init == Tensor::ones;
                write(memory(), master + t.offset + first, part);
            });
        }
        round_master();
    }

    void save(const std::string &dir, const std::string &export_dtype) {
        std::vector<TensorSpec> tensors;
        for (const Tensor &t : table) tensors.push_back({t.name, t.shape, export_dtype});
        HfWriter writer(dir, tensors);
        for (const Tensor &t : table)
            if (master) writer.write(t.name, master + t.offset, memory());
            else writer.write(t.name, params + t.offset, memory());
        writer.finish();
    }

    double gradient_norm() { return std::sqrt(squared_norm(dev, norm_scratch, grads, count)); }

    std::string nonfinite_gradient() {
        for (const Tensor &t : table)
            if (!std::isfinite(squared_norm(dev, norm_scratch, grads + t.offset, t.count))) return t.name;
        return "";
    }

    void update(const AdamW &adamw) {
        for (size_t i = 0, end; i < table.size(); i = end) {  // runs of tensors that decay, or do not
            for (end = i + 1; end < table.size() && table[end].decay == table[i].decay;) end++;
            AdamW run = adamw;
            if (MUTANT(17, false, !table[i].decay)) run.weight_decay = 0;
            const size_t from = table[i].offset, n = table[end - 1].offset + table[end - 1].count - from;
            adamw_update(dev, params + from, master + from, m + from, v + from, grads + from, run, n);
        }
    }

    void round_master() {
        if constexpr (sizeof(X) != sizeof(float)) round_floats(dev, params, master, count);
    }

  private:
    std::unique_ptr<Memory> memory_;
};
