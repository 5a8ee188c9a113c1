// Attention over a ring of ranks that are threads, on the CPU or with kernels: deals the rows to the ranks and collects the results.
#pragma once
#include "../llmc/parallel/ring.h"
#include "reference_attention.h"

inline const AttentionCost any_cost{1, 1, 1, 2, 1e12, 1e10};

struct RingCase {
    size_t ranks;
    SpMode mode;
    Layout layout;
    size_t head_stride = 1;

    std::string name() const {
        const char *modes[] = {"ring", "gather", "ulysses"};
        return format("%s over %zu, %s", modes[size_t(mode)], ranks, name_of(layout)) +
               (mode == SpMode::gather ? format(", %zu heads", head_stride) : "");
    }
};

template <class X> struct RingResult {
    AttentionResult<X> result;
    Payload payload;  // of all ranks
};

// n values, initially NaN, and guards behind them
template <template <class> class Array, class T> struct Guarded {
    static constexpr size_t guard = 64;
    size_t n;
    Array<T> array;
    explicit Guarded(size_t n) : n(n), array(n + guard) {}
    T *data() { return array.data(); }
    std::vector<T> values() const {
        std::vector<T> out = array.values();
        if (!std::all_of(out.begin() + long(n), out.end(), [](T x) { return std::isnan(float(x)); }))
            die("written behind the end of an array");
        out.resize(n);
        return out;
    }
};

// One rank: copies its rows in, runs both passes, and copies the results to their places in `all`, which the ranks share.
template <template <class> class Array, class Dev, class X = typename Dev::X>
void run_rank(Dev dev, Comm &comm, const RingCase &c, const SequenceSplit &split, const AttentionCase &a,
              const AttentionValues<X> &in, RingResult<X> &all, Payload &payload) {
    const size_t T = split.local_T(), H = a.H, KV = a.KV, D = a.D, row = (H + 2 * KV) * D;
    const auto positions = split.positions(size_t(comm.rank));
    std::vector<X> l_qkv(T * row), l_dout(T * H * D);
    for (size_t t = 0; t < T; t++) {
        std::copy_n(in.qkv.begin() + long(positions[t] * row), row, l_qkv.begin() + long(t * row));
        std::copy_n(in.dout.begin() + long(positions[t] * H * D), H * D, l_dout.begin() + long(t * H * D));
    }
    Array<X> qkv(l_qkv), dout(l_dout);
    Array<int32_t> first_key(a.first_key()), cuts(a.cuts());
    Guarded<Array, X> out(T * H * D);
    Guarded<Array, float> out32(T * H * D), lse(H * T), dq(T * H * D), dk(T * KV * D), dv(T * KV * D), delta(H * T),
        scratch(attention_scratch(dev, a.shape(T)));
    const AttentionInputs<X> inputs{{qkv.data(), row}, {qkv.data() + H * D, row},      {qkv.data() + (H + KV) * D, row},
                                    first_key.data(),  {cuts.data(), a.cuts().size()}, a.shape(T)};
    const PromptSplit shared = split_prompts(a.outline(), a.window);
    Array<int32_t> prompt_key(shared.first_key);
    const PromptParts prompts{shared.parts, prompt_key.data()};
    RingAttention ring{comm, c.mode, c.head_stride, split, split.travel[0], prompts, payload};
    for (bool backward : {false, true}) {
        const auto sizes = ring_attention_buffers(c.mode, split.ranks, c.head_stride, inputs.shape, backward);
        Guarded<Array, X> values(sizes.values);
        Guarded<Array, float> floats(sizes.floats);
        const RingBuffers<X> buffers{sizes.values ? values.data() : nullptr, sizes.floats ? floats.data() : nullptr};
        if (backward)  // in place
            ring_attention_backward(dev, ring, qkv.data(), AttentionGrads{dq.data(), dk.data(), dv.data()}, delta.data(),
                                    scratch.data(), inputs, out.data(), dout.data(), lse.data(), buffers);
        else ring_attention_forward(dev, ring, out.data(), out32.data(), lse.data(), inputs, buffers);
        comm.barrier();  // no rank still reads these buffers
        values.values(), floats.values();
    }
    for (auto *x : {&out32, &dq, &dk, &dv, &delta}) x->values();
    const auto got_out = out.values(), got_dqkv = qkv.values();
    const auto got_lse = lse.values();
    for (size_t t = 0; t < T; t++) {
        std::copy_n(got_out.begin() + long(t * H * D), H * D, all.result.out.begin() + long(positions[t] * H * D));
        std::copy_n(got_dqkv.begin() + long(t * row), row, all.result.dqkv.begin() + long(positions[t] * row));
        for (size_t h = 0; h < H; h++)
            if (c.mode != SpMode::ulysses) all.result.lse[h * a.T() + positions[t]] = got_lse[h * T + t];
    }
    if (c.mode == SpMode::ulysses) std::copy(got_lse.begin(), got_lse.end(), all.result.lse.begin() + comm.rank * long(H * T));
}

// with_device(host, f) calls f with the device of this rank and the communicator for slices on it.
template <template <class> class Array, class X, class WithDevice>
RingResult<X> run_ring(const RingCase &c, const AttentionCase &a, const AttentionValues<X> &in, WithDevice with_device) {
    const LayerKind kinds[] = {{a.window, 1}};
    const SequenceSplit split = split_sequence(c.layout, a.outline(), c.ranks, kinds, any_cost);
    RingResult<X> all{{std::vector<X>(a.T() * a.H * a.D), std::vector<X>(in.qkv.size()), std::vector<float>(a.H * a.T())}, {}};
    std::vector<Payload> payloads(c.ranks);
    run_threads(int(c.ranks), CommOptions{true, 60}, [&](Comm &host) {
        with_device(host,
                    [&](auto dev, Comm &comm) { run_rank<Array>(dev, comm, c, split, a, in, all, payloads[size_t(comm.rank)]); });
        return 0;
    });
    for (const Payload &p : payloads) all.payload.kv += p.kv, all.payload.dkv += p.dkv;
    return all;
}
