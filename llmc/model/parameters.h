// Loads, initialises and saves the parameters of a model. All functions walk the parameter table, which is the only list of its tensors.
#pragma once
#include <algorithm>
#include <cmath>
#include <exception>

#include "../core/common.h"
#include "../core/rng.h"
#include "../io/hf.h"
#include "../parallel/zero.h"

// Returns the initial values of elements [first, first + n) of a tensor, a function of seed and tensor name alone. The weights of norms are 1,
// biases are 0, and matrices are drawn from a normal distribution around 0 with this deviation. The head of a reward model has the deviation
// 1 / (C + 1), as in OpenRLHF, so rewards begin near 0. In an adapter, A is uniform within +-1 / sqrt(its columns) and B is 0, as in PEFT, so the
// adapted model initially equals its base. Rates of decay are uniform within 0 and 16, as in transformers.
inline std::vector<float> initial_values(const Tensor &t, size_t first, size_t n, uint64_t seed, double deviation) {
    const Random random{seed, Purpose::init, stream_of(t.name)};
    if (t.init == Tensor::score) deviation = 1.0 / double(t.count + 1);
    std::vector<float> out(n, t.init == Tensor::ones);
    if (t.init == Tensor::ones || t.init == Tensor::zeros || t.init == Tensor::lora_b) return out;
    if (t.init == Tensor::lora_a) {
        for (size_t i = 0; i < n; i++) out[i] = float((2 * random.uniform(first + i) - 1) / std::sqrt(double(t.shape[1])));
        return out;
    }
    if (t.init == Tensor::rate) {
        for (size_t i = 0; i < n; i++) out[i] = float(std::log(std::max(16 * random.uniform(first + i), 0.01)));
        return out;
    }
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) out[i] = float(deviation * random.normal(first + i));
    return out;
}

// Runs on all threads, because a model has billions of parameters.
template <class X> std::vector<X> rounded(const std::vector<float> &values) {
    std::vector<X> out(values.size());
#pragma omp parallel for
    for (size_t i = 0; i < values.size(); i++) out[i] = X(values[i]);
    return out;
}

// Returns elements [first, first + n) of the transpose of a matrix (rows, columns).
template <class T> std::vector<T> transposed(const std::vector<T> &matrix, size_t rows, size_t columns, size_t first, size_t n) {
    std::vector<T> out(n);
#pragma omp parallel for
    for (size_t i = first; i < first + n; i++) out[i - first] = matrix[i % rows * columns + i / rows];
    return out;
}

// Returns a cut tensor whole.
inline Tensor uncut(Tensor t) {
    t.count = t.whole_count(), t.shape = t.whole_shape(), t.cut = {};
    return t;
}

// Reads elements [first, first + n) of a tensor. A reward model may start from a language model; the file then has no tensor for its head, which gets
// initial values, as adapters do. A transposed tensor is read as a whole, because any part of the transpose needs all of it.
template <class P>
void load_part(const HfWeights &weights, const Tensor &t, size_t first, size_t n, uint64_t seed, P *to, Memory &memory) {
    if (t.transposed) {
        const std::vector<size_t> shape = t.whole_shape();
        std::vector<P> whole(t.whole_count());
        HostMemory host;
        weights.read(t.name, {shape[1], shape[0]}, whole.data(), host);
        return t.for_runs(first, n, [&](size_t begin, size_t at, size_t run) {
            write(memory, to + at, transposed(whole, shape[1], shape[0], begin, run));
        });
    }
    if (t.cut.dim >= 0)
        return t.for_runs(first, n, [&, whole = uncut(t)](size_t begin, size_t at, size_t run) {
            load_part(weights, whole, begin, run, seed, to + at, memory);
        });
    const bool may_be_new = t.init == Tensor::score || t.init == Tensor::lora_a || t.init == Tensor::lora_b;
    if (!may_be_new || weights.find(t.name)) return weights.read_part(t.name, t.shape, first, n, to, memory);
    const auto values = initial_values(t, first, n, seed, 0);
    write(memory, to, rounded<P>(values));
}

// Every rank reads all weights, or only its shard if they are prefetched (zero.h); to train in bf16 it also reads its shard as floats. A tensor that is
// missing in `weights` is read from `base`: the head of a reward model, which not every adapter has.
template <class Dev>
void load_parameters(ShardedParameters<Dev> &zero, const HfWeights &weights, const HfWeights &base, uint64_t seed,
                     Memory &memory) {
    using X = typename Dev::X;
    const auto load = [&](const Tensor &t, size_t first, size_t n, auto *to, Memory &where) {
        load_part(weights.find(t.name) ? weights : base, t, first, n, seed, to, where);
    };
    if (!zero.prefetched())
        for (const Tensor &t : zero.table) load(t, 0, t.count, zero.params + t.offset, memory);
    if (!zero.prefetched() && !zero.lower) return;
    HostMemory host;
    zero.set_runs([&](const TensorRun &s) {
        const Tensor &t = zero.table[s.tensor];
        if (!zero.lower) return load(t, s.first, s.count, zero.params_at(s).rounded, memory);
        const auto load_floats = [&](size_t first, size_t n) {
            std::vector<float> values(n);
            load(t, s.first + first, n, values.data(), host);
            // Rounds ties to even, as on the other ranks and in transformers, by starting from one float below.
#pragma omp parallel for
            for (size_t i = 0; i < n; i++)
                if (float(X(values[i])) != float(Floats<X>::round(values[i]))) values[i] = std::nextafter(values[i], 0.0f);
            write(memory, zero.params_at(s) + first, values);
        };
        if (t.transposed) load_floats(0, s.count);
        else in_parts(s.count, load_floats);
    });
}

// GPT-2's projections into the residual stream begin smaller, divided by the square root of their number (Radford et al., 2019, section 2.3).
template <class Dev>
void initialise_parameters(ShardedParameters<Dev> &zero, const ShardRanks &ranks, uint64_t seed, double deviation,
                           Memory &memory) {
    const auto residuals = std::ranges::count(zero.table, Tensor::residual, &Tensor::init);
    zero.set_runs([&](const TensorRun &s) {
        in_parts(s.count, [&](size_t first, size_t n) {
            const Tensor &t = zero.table[s.tensor];
            const double own = t.init == Tensor::residual ? deviation / std::sqrt(double(residuals)) : deviation;
            t.for_runs(s.first + first, n, [&, whole = uncut(t)](size_t begin, size_t at, size_t run) {
                const auto values = initial_values(whole, begin, run, seed, own);
                const Floats<typename Dev::X> to = zero.params_at(s) + first + at;
                if (zero.lower) write(memory, to, values);
                else write(memory, to.rounded, rounded<typename Dev::X>(values));
            });
        });
    });
    zero.gather(ranks);
}

// Returns the weights of bucket b, in the type of the computation. Prefetched weights are copied to `buffer`, which has room for the bucket with its
// padding.
template <class Dev>
const typename Dev::X *whole_bucket(ShardedParameters<Dev> &zero, const ShardRanks &ranks, size_t b, float *buffer) {
    using X = typename Dev::X;
    const Bucket &bucket = zero.sharding.buckets[b];
    if (!zero.prefetched()) return zero.params + bucket.begin;
    X *const all = reinterpret_cast<X *>(buffer), *const own = all + bucket.own * bucket.part;
    zero.read_part(
        b, [&](Floats<X> part, size_t first, size_t n) { ranks.group.memory.copy(own + first, part.rounded, n * sizeof(X)); });
    if (zero.sharding.divided) ranks.of(bucket.holders).all_gather({own, bucket.part}, {all, bucket.padded()});
    return all;
}

// Calls f(tensor, first, at, n) for each part of a tensor in the model's elements [begin, begin + count): the tensor's elements [first, first + n)
// begin at element `at`.
template <class F> void for_parts(const std::vector<Tensor> &whole, size_t begin, size_t count, F f) {
    for (const Tensor &t : whole) {
        const size_t from = std::max(t.offset, begin), to = std::min(t.offset + t.count, begin + count);
        if (from < to) f(t, from - t.offset, from - begin, to - from);
    }
}

// Copies all weights to a model that is not shared among ranks, in the type of the computation.
template <class Dev, class F>
void copy_parameters(ShardedParameters<Dev> &zero, const ShardRanks &ranks, ShardedParameters<Dev> &to, F buffer) {
    const SliceMemory &memory = ranks.group.memory;
    zero.ready(ranks, 0, zero.sharding.elements);
    for (size_t b = 0; b < zero.sharding.buckets.size(); b++) {
        const Bucket &bucket = zero.sharding.buckets[b];
        const auto *weights = whole_bucket(zero, ranks, b, buffer(b));
        for_parts(zero.whole, bucket.global, bucket.count, [&](const Tensor &t, size_t first, size_t at, size_t n) {
            memory.copy(to.params + to.sharding.flat(t.offset) + first, weights + at, n * sizeof(*weights));
        });
    }
    memory.finish();
}

// Returns every rank's values on rank 0, and nothing elsewhere. They travel through `room`, which has `size` elements on each rank.
template <class T>
std::vector<std::vector<T>> gather_on_first(Comm &comm, const std::vector<T> &own, T *room, size_t size, Memory &memory) {
    std::vector<std::vector<T>> all(size_t(comm.rank == 0 ? comm.size : 0));
    if (comm.rank == 0) all[0] = own;
    const auto counts = comm.gather(own.size());
    for (size_t r = 1; r < counts.size(); r++)
        in_parts(
            counts[r],
            [&](size_t first, size_t n) {
                const bool sends = size_t(comm.rank) == r, receives = comm.rank == 0;
                const Slice slice(room, n);
                if (sends) memory.write(room, own.data() + first, n * sizeof(T));
                comm.wait(comm.exchange(sends ? slice : Slice(), 0, receives ? slice : Slice(), int(r)));
                if (!receives) return;
                all[r].resize(first + n);
                memory.read(all[r].data() + first, room, n * sizeof(T));
            },
            size);
    return all;
}

// Puts a cut tensor together from the parts of all ranks, in order.
template <class T> std::vector<T> put_together(const Tensor &t, const std::vector<std::vector<T>> &parts) {
    std::vector<T> whole(t.whole_count());
    const bool by_columns = t.cut.dim == 1;
    const size_t rows = by_columns ? t.shape[0] : t.cut.whole, width = whole.size() / rows;
    Tensor own = t;
    own.cut.first = 0;
    for (const std::vector<T> &part : parts) {
        own.count = part.size(), own.shape[size_t(t.cut.dim)] = part.size() / (by_columns ? rows : width);
        own.for_runs(0, own.count, [&](size_t begin, size_t at, size_t run) {
            std::copy_n(part.begin() + ptrdiff_t(at), run, whole.begin() + ptrdiff_t(begin));
        });
        own.cut.first += own.shape[size_t(t.cut.dim)];
    }
    return whole;
}

// Rank 0 writes the model, or its adapters, bucket by bucket, so no second copy of it exists. The float weights of a model that computes in bf16, and
// prefetched weights, are gathered into buffer(b), which has room for bucket b with its padding. Divided experts, and the parts of cut tensors, arrive
// there from one rank after another; rank 0 puts a bucket's cut tensors together on the host. If rank 0 fails, all ranks throw its error.
template <class Dev, class F>
void save_parameters(ShardedParameters<Dev> &zero, const Mesh &mesh, const std::string &dir, const std::string &export_dtype,
                     Memory &memory, F buffer, const WeightFiles &files = model_files) {
    using X = typename Dev::X;
    const Sharding &sharding = zero.sharding;
    const ShardRanks &ranks = mesh.shards;
    const bool from_halves = zero.lower && export_dtype == "F32";
    zero.ready(ranks, 0, sharding.elements);
    std::unique_ptr<HfWriter> writer;
    std::exception_ptr error;  // rank 0 keeps its error while the other ranks continue to gather
    const auto on_rank_0 = [&](auto f) {
        if (mesh.all.rank != 0 || error) return;
        try {
            f();
        } catch (...) {
            error = std::current_exception();
        }
    };

    on_rank_0([&] {
        std::vector<TensorSpec> tensors;
        for (const Tensor &t : zero.whole) {
            tensors.push_back({t.name, t.whole_shape(), export_dtype});
            if (t.transposed) std::swap(tensors.back().shape[0], tensors.back().shape[1]);
        }
        writer = std::make_unique<HfWriter>(dir, tensors, files);
    });
    const auto write_elements = [&](const auto *values, size_t begin, size_t count) {
        for_parts(zero.whole, begin, count, [&](const Tensor &t, size_t, size_t at, size_t n) {
            on_rank_0([&] {
                if (!t.transposed) return writer->write(t.name, values + at, n, memory);
                HostMemory host;  // a bucket always contains a transposed tensor as a whole, because only embeddings are divided
                const auto turned = transposed(read(memory, values + at, t.count), t.shape[0], t.shape[1], 0, t.count);
                writer->write(t.name, turned.data(), t.count, host);
            });
        });
    };
    // Writes the cut tensors of consecutive buckets, [begin, end), of which the tensor group of rank 0 sends it the parts.
    const auto write_cut = [&]<class T>(size_t first, size_t last, T *room, auto values_of) {
        const size_t begin = sharding.buckets[first].global;
        const bool joins = size_t(mesh.all.rank) < sharding.tensor_ranks;
        std::vector<T> own;
        for (size_t b = first; b < last; b++) {
            const T *const values = values_of(b);
            if (!joins) continue;
            own.resize(own.size() + sharding.buckets[b].count);
            memory.read(own.data() + (sharding.buckets[b].global - begin), values, sharding.buckets[b].count * sizeof(T));
        }
        if (!joins) return;
        size_t size = sharding.buckets[last - 1].padded();
        for (size_t other : ranks.tensor->gather(size)) size = std::min(size, other);
        for_parts(zero.whole, begin, own.size(), [&](const Tensor &t, size_t, size_t at, size_t n) {
            const std::vector<T> part(own.begin() + ptrdiff_t(at), own.begin() + ptrdiff_t(at + n));
            const auto parts = gather_on_first(*ranks.tensor, part, room, size, memory);
            on_rank_0([&] {
                HostMemory host;
                auto whole = put_together(t, parts);
                if (t.transposed) whole = transposed(whole, t.whole_shape()[0], t.whole_shape()[1], 0, whole.size());
                writer->write(t.name, whole.data(), whole.size(), host);
            });
        });
    };
    const auto floats_of = [&](size_t b) {
        const Bucket &bucket = sharding.buckets[b];
        float *const own = buffer(b) + bucket.own * bucket.part;
        zero.read_part(b, [&](const auto &halves, size_t begin, size_t count) {
            in_parts(count, [&](size_t first, size_t n) { write(memory, own + begin + first, read(memory, halves + first, n)); });
        });
        if (sharding.parts > 1) ranks.of(bucket.holders).all_gather({own, bucket.part}, {buffer(b), bucket.padded()});
        return own - bucket.own * bucket.part;
    };
    // The buckets of a unit's rows, of which the ranks of a tensor group may have different numbers, are written together.
    const auto end_of_range = [&](size_t b) {
        const auto &buckets = sharding.buckets;
        const auto begins_unit = [&](const Bucket &bucket) { return std::ranges::count(sharding.unit_begins, bucket.shard) > 0; };
        for (b++; b < buckets.size() && buckets[b].holders == Holders::same_cut && !begins_unit(buckets[b]);) b++;
        return b;
    };
    const auto write_bucket = [&]<class T>(size_t b, T *room, auto values_of) {
        const Bucket &bucket = sharding.buckets[b];
        if (bucket.holders == Holders::all) return write_elements(values_of(b), bucket.global, bucket.count);
        if (bucket.holders == Holders::same_cut) return write_cut(b, end_of_range(b), room, values_of);
        for (size_t r = 0; r < sharding.expert_ranks; r++) {
            const T *const own = values_of(b);
            if (own != room && r == sharding.expert_own) ranks.group.memory.copy(room, own, bucket.count * sizeof(T));
            ranks.experts->broadcast({room, bucket.count}, int(r));
            write_elements(room, bucket.range + r * bucket.count, bucket.count);
        }
    };
    for (size_t b = 0; b < sharding.buckets.size();
         b = sharding.buckets[b].holders == Holders::same_cut ? end_of_range(b) : b + 1) {
        if (from_halves) write_bucket(b, buffer(b), floats_of);
        else write_bucket(b, reinterpret_cast<X *>(buffer(b)), [&](size_t n) { return whole_bucket(zero, ranks, n, buffer(n)); });
    }
    on_rank_0([&] { writer->finish(); });
    writer.reset();  // removes an unfinished file
    agree(mesh.all, [&] {
        if (error) std::rethrow_exception(error);
    });
}

// Returns the name of the first tensor whose summed gradient is not finite, or an empty name.
template <class Dev> std::string nonfinite_gradient(Zero<Dev> &zero, Comm &comm) {
    const auto index_of = [&](size_t element) {
        size_t i = 0;
        while (i < zero.whole.size() && zero.whole[i].offset + zero.whole[i].count <= element) i++;
        return i;
    };
    size_t first = zero.whole.size();  // index of the tensor
    for (const TensorRun &s : zero.sharding.tensor_runs(zero.table))
        if (!std::isfinite(zero.gradients.squared_norm_of(s))) first = std::min(first, index_of(s.global));
    for (size_t other : comm.gather(first)) first = std::min(first, other);
    return first < zero.whole.size() ? zero.whole[first].name : "";
}
