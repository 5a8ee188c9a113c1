// The arrays of generation: a paged cache of keys and values, or states in layers with linear attention, which the passes of Decoder::next_logits() fill from
// prompts and read for the newest token of each sequence; the logits of the last tokens; and the tokens drawn from them. ../train/generation.h decides
// which sequences run.
#pragma once
#include <algorithm>
#include <vector>

#include "../core/arena.h"
#include "../ops/attention_decode.h"
#include "../ops/delta_decode.h"
#include "../ops/embedding.h"
#include "../ops/layout.h"
#include "../ops/matmul.h"
#include "../ops/sample.h"
#include "../parallel/mesh.h"
#include "delta.h"
#include "device_row.h"
#include "model.h"

template <class Dev> class GenerationArrays {
  public:
    using X = typename Dev::X;

    GenerationArrays(Dev dev, const ModelConfig &config, const ModelLimits &limits) : dev(dev), config(config), limits(limits) {}

    void plan(Plan &plan, size_t T);
    // Loads what a pass needs besides tokens and positions: slots, and the keys that each token sees. Sets the last token of each prompt as predictor.
    void load(const Row &row, const CacheStep &step, DeviceRow &device_row, Memory &memory);
    // Stores the row's keys and values in the cache of layer l.
    void store(size_t l, const AttentionInputs<X> &in) {
        cache_store(dev, cache_[l], in.k, in.v, slots_, in.shape.T, config.KV, config.D);
    }
    // Attention of the newest tokens, which see the cache, and of their own sequence what is before them in the row: store() has put it there.
    void attention(size_t l, X *out, const AttentionInputs<X> &in) {
        attention_decode(dev, out, scratch_, in.q, PagedKeys<X>{cache_[l], table_, in.first_key, length_, limits.sequence_pages},
                         in.shape);
    }
    // What layer l knows of earlier tokens by linear attention.
    DeltaCache<X> delta(size_t l) const { return {delta_[l].states, delta_[l].columns, state_slots_}; }
    // normf (T, C): the normed output of the last layer
    void find_logits(const X *normf, const X *head_w, const DeviceRow &row);
    // tensor: the ranks that divide the vocabulary, or null. Each draws the tokens of its share of the sequences, from whole rows of logits.
    std::vector<float> logits(Memory &memory, Comm *tensor);
    DrawnTokens draw(const DrawRequest &request, Memory &memory, Comm *tensor, Payload &sent);
    void copy_page(size_t to, size_t from);
    void copy_state(size_t to, size_t from);

  private:
    size_t whole_V() const { return config.part.ranks > 1 ? config.part.vocabulary.whole : config.V; }
    bool has_earlier(size_t T) const { return T > sequences_; }  // tokens before the newest of a sequence
    Share share() const;
    void exchange(Comm &tensor, Payload &sent);

    const Dev dev;
    const ModelConfig &config;
    const ModelLimits &limits;
    size_t sequences_;  // of the last next_logits()
    std::vector<X *>
        cache_;  // (L) x (pages * cache_page, 2*KV*D)   the keys and values of all tokens so far; null with linear attention
    std::vector<DeltaCache<X>> delta_;                   // (L)   only in layers with linear attention
    int32_t *state_slots_ = nullptr;                     // (T) CacheStep
    X *last_;                                            // (sequences, C)
    float *logits_;                                      // (sequences, logits_ld)
    float *whole_;                                       // (the rank's share of sequences, logits_ld)  with a divided vocabulary
    float *scratch_;                                     // attention_decode_scratch
    int32_t *slots_;                                     // (T) CacheStep
    int32_t *table_;                                     // (newest tokens, sequence_pages)
    int32_t *length_;                                    // (newest tokens)
    int32_t *first_draw_, *first_occurred_, *occurred_;  // (sequences + 1), (sequences + 1), (limits.occurred)   DrawRequest
    uint64_t *random_;                                   // (draws)
    int32_t *drawn_;                                     // (draws)
    float *drawn_logps_;                                 // (draws)
};

template <class Dev> void GenerationArrays<Dev>::plan(Plan &plan, size_t T) {
    if (limits.cache_pages == 0) return;
    const size_t n = limits.sequences, pages = limits.sequence_pages, C = config.C, newest = n + limits.appended;
    cache_.resize(config.L), delta_.resize(config.L);
    for (size_t l = 0; l < config.L; l++) {
        const DeltaConfig &d = config.delta;
        if (!config.has_delta(l)) {
            plan.add(&cache_[l], format("cache.%zu", l), {limits.cache_pages * cache_page, 2 * config.KV * config.D});
            continue;
        }
        plan.add(&delta_[l].states, format("state.%zu", l), {state_slots(n), d.Hv, d.Dk, d.Dv});
        plan.add(&delta_[l].columns, format("columns.%zu", l), {state_slots(n), conv_columns, d.row()});
    }
    if (config.delta.Hk) plan.add(&state_slots_, "row.states", {T});
    plan.add(&slots_, "row.slots", {T});
    plan.add(&table_, "row.table", {newest, pages});
    plan.add(&length_, "row.length", {newest});
    plan.transient(&scratch_, "decode scratch", {attention_decode_scratch(dev, newest, pages, config.H, config.D)});
    plan.transient(&last_, "last rows", {n, C});
    plan.transient(&logits_, "logits", {n, logits_ld(dev, config.V)});
    if (config.part.ranks > 1)
        plan.transient(&whole_, "whole logits", {ceil_div(n, config.part.ranks), logits_ld(dev, whole_V())});
    plan.add(&first_draw_, "row.first_draw", {n + 1});
    plan.add(&random_, "row.random", {limits.draws});
    plan.add(&drawn_, "drawn tokens", {limits.draws});
    plan.add(&drawn_logps_, "drawn log-probabilities", {limits.draws});
    if (limits.occurred == 0) return;
    plan.add(&first_occurred_, "row.first_occurred", {n + 1});
    plan.add(&occurred_, "row.occurred", {limits.occurred});
}

template <class Dev> void GenerationArrays<Dev>::load(const Row &r, const CacheStep &step, DeviceRow &row, Memory &memory) {
    sequences_ = r.doc_offsets.size() - 1;
    write(memory, slots_, step.slots);
    if (state_slots_) write(memory, state_slots_, step.states);
    if (has_earlier(r.T)) {
        std::vector<int32_t> ends(sequences_);
        for (size_t i = 0; i < sequences_; i++) ends[i] = int32_t(r.doc_offsets[i + 1]) - 1;
        write(memory, row.predictors, ends);
    }
    if (step.prompts) {
        row.split = split_row(config, {}, sizeof(X), r);
        row.load_first_keys(r, memory);
        return;
    }
    const int32_t window = int32_t(*std::max_element(config.window.begin(), config.window.end()));
    std::vector<int32_t> first_key(r.T);
    write(memory, row.first_key, first_key);
    for (size_t t = 0; t < r.T; t++) first_key[t] = std::max(0, step.length[t] - window);
    write(memory, row.first_key_window, first_key);
    write(memory, table_, step.table);
    write(memory, length_, step.length);
}

template <class Dev> void GenerationArrays<Dev>::find_logits(const X *normf, const X *head_w, const DeviceRow &row) {
    const size_t C = config.C, V = config.V;
    const bool gathers = has_earlier(row.T);
    if (gathers) embedding_forward(dev, last_, normf, row.predictors, sequences_, C, row.T);
    matmul_forward(dev, logits_, gathers ? last_ : normf, head_w, (const X *)nullptr, sequences_, C, V, logits_ld(dev, V));
}

// The sequences for which this rank draws.
template <class Dev> Share GenerationArrays<Dev>::share() const {
    const size_t most = ceil_div(sequences_, config.part.ranks), first = std::min(sequences_, most * config.part.rank);
    return {first, std::min(most, sequences_ - first), sequences_};
}

// Sends each rank its sequences' logits, and receives the other parts of the rows of this rank's sequences.
template <class Dev> void GenerationArrays<Dev>::exchange(Comm &tensor, Payload &sent) {
    const size_t ranks = config.part.ranks, most = ceil_div(sequences_, ranks), ld = logits_ld(dev, config.V),
                 own = config.part.rank;
    std::vector<Slice> send, receive;
    for (size_t r = 0; r < ranks; r++)
        for (size_t i = 0; i < most; i++) {
            const Share from = vocabulary_of(config.part, r);
            const bool to = r * most + i < sequences_, here = own * most + i < sequences_;
            send.push_back(to ? Slice(logits_ + (r * most + i) * ld, config.V) : Slice());
            receive.push_back(here ? Slice(whole_ + i * logits_ld(dev, whole_V()) + from.first, from.count) : Slice());
            sent.tensor += r == own ? 0 : send.back().bytes();
        }
    if constexpr (is_rehearsal<Dev>) dev.note(logits_, whole_);
    tensor.exchange_all(send, receive);
}

template <class Dev> std::vector<float> GenerationArrays<Dev>::logits(Memory &memory, Comm *tensor) {
    const size_t V = whole_V(), ld = logits_ld(dev, V);
    const Share rows = share();
    if (Payload sent; tensor) exchange(*tensor, sent);
    const auto own = read(memory, tensor ? whole_ : logits_, rows.count * ld);
    std::vector<double> out(sequences_ * V);
    for (size_t i = 0; i < rows.count; i++)
        std::copy_n(own.data() + i * ld, V, out.data() + (rows.first + i) * V);  // without padding
    if (tensor) out = tensor->sum(out);
    return {out.begin(), out.end()};
}

template <class Dev> DrawnTokens GenerationArrays<Dev>::draw(const DrawRequest &r, Memory &memory, Comm *tensor, Payload &sent) {
    const size_t n = r.random.size(), V = whole_V();
    const bool penalises = !r.occurred.empty();
    write(memory, first_draw_, r.first);
    write(memory, random_, r.random);
    if (penalises) write(memory, first_occurred_, r.first_occurred), write(memory, occurred_, r.occurred);
    const Share rows = share();
    if (tensor) exchange(*tensor, sent);
    if (rows.count)
        sample(dev, drawn_, r.logps ? drawn_logps_ : nullptr, tensor ? whole_ : logits_,
               Draws{first_draw_ + rows.first, random_, first_occurred_ + rows.first, penalises ? occurred_ : nullptr},
               r.sampling, r.vocabulary, rows.count, V, logits_ld(dev, V));
    DrawnTokens drawn{read(memory, drawn_, n), r.logps ? read(memory, drawn_logps_, n) : std::vector<float>()};
    if (!tensor) return drawn;
    const size_t begin = size_t(r.first[rows.first]), end = size_t(r.first[rows.first + rows.count]);
    const auto from_all = [&](auto &values, auto zero) {
        std::vector<decltype(zero)> own(values.size());
        for (size_t i = begin; i < std::min(end, own.size()); i++) own[i] = values[i];
        const auto sums = tensor->sum(own);
        for (size_t i = 0; i < own.size(); i++) values[i] = std::remove_reference_t<decltype(values[0])>(sums[i]);
    };
    from_all(drawn.tokens, int64_t());
    from_all(drawn.logps, double());
    return drawn;
}

template <class Dev> void GenerationArrays<Dev>::copy_page(size_t to, size_t from) {
    const size_t width = 2 * config.KV * config.D;
    for (X *cache : cache_)
        if (cache)
            copy_rows(dev, cache + to * cache_page * width, width, cache + from * cache_page * width, width, cache_page, width);
}

template <class Dev> void GenerationArrays<Dev>::copy_state(size_t to, size_t from) {
    const DeltaConfig &d = config.delta;
    const auto copy = [&](auto *slots, size_t rows, size_t width) {
        copy_rows(dev, slots + to * rows * width, width, slots + from * rows * width, width, rows, width);
    };
    for (const DeltaCache<X> &c : delta_)
        if (c.states) copy(c.states, d.Hv, d.Dk * d.Dv), copy(c.columns, conv_columns, d.row());
}
