// Generates with a decoder. Forward passes fill a paged cache of keys and values from prompts, or read it for the newest token of each sequence; then
// logits are computed and tokens are drawn from them. ../train/generation.h decides which sequences run.
#pragma once
#include <algorithm>
#include <vector>

#include "../core/arena.h"
#include "../ops/attention_decode.h"
#include "../ops/embedding.h"
#include "../ops/layout.h"
#include "../ops/matmul.h"
#include "../ops/sample.h"
#include "model.h"

template <class Dev> class Decoder;

template <class Dev> class CachedGenerator final : public Generator {
  public:
    using X = typename Dev::X;

    explicit CachedGenerator(Decoder<Dev> &decoder) : decoder_(decoder) {}

    void plan(Plan &plan);
    void next_logits(const Row &row, const CacheStep &step) override;
    std::vector<float> logits() override;
    DrawnTokens draw(const DrawRequest &request) override;
    void finish() override;
    void copy_cache_page(size_t to, size_t from) override;

    // True if the decoder's row is one of next_logits(). The decoder calls stop() when it loads another row.
    bool runs() const { return pass_ != none; }
    void stop() { pass_ = none; }
    // A layer's attention during generation: stores the new keys and values. Returns false for prompts, which only see themselves, so the decoder
    // computes their attention.
    bool attention(size_t l, X *out, const AttentionInputs<X> &in);

  private:
    // With ZeRO-3 or divided experts every rank must join each forward pass; ranks that finished generating join with an empty row until all are
    // done.
    bool all_finished(bool finished) {
        const bool all_join = decoder_.weights_->prefetched.divided() || decoder_.mesh_->experts;
        return !all_join || decoder_.mesh_->all.all(finished);
    }

    Decoder<Dev> &decoder_;
    enum { none, prompts, tokens } pass_ = none;
    size_t sequences_;        // of the last next_logits()
    std::vector<X *> cache_;  // (L) x (pages * cache_page, 2*KV*D)   the keys and values of all tokens so far
    X *last_;                 // (sequences, C)
    float *logits_;           // (sequences, logits_ld)
    float *scratch_;          // attention_decode_scratch
    int32_t *slots_;          // (T) CacheStep
    int32_t *table_;          // (sequences, sequence_pages)
    int32_t *length_;         // (sequences)
    int32_t *first_draw_, *first_occurred_, *occurred_;  // (sequences + 1), (sequences + 1), (limits.occurred)   DrawRequest
    uint64_t *random_;                                   // (draws)
    int32_t *drawn_;                                     // (draws)
    float *drawn_logps_;                                 // (draws)
};

template <class Dev> void CachedGenerator<Dev>::plan(Plan &plan) {
    const ModelConfig &c = decoder_.config;
    const ModelLimits &limits = decoder_.limits;
    if (limits.cache_pages == 0) return;
    const size_t n = limits.sequences, pages = limits.sequence_pages;
    cache_.resize(c.L);
    for (size_t l = 0; l < c.L; l++)
        plan.add(&cache_[l], format("cache.%zu", l), {limits.cache_pages * cache_page, 2 * c.KV * c.D});
    plan.add(&slots_, "row.slots", {decoder_.T_max});
    plan.add(&table_, "row.table", {n, pages});
    plan.add(&length_, "row.length", {n});
    plan.transient(&scratch_, "decode scratch", {attention_decode_scratch(decoder_.dev, n, pages, c.H, c.D)});
    plan.transient(&last_, "last rows", {n, c.C});
    plan.transient(&logits_, "logits", {n, logits_ld(decoder_.dev, c.V)});
    plan.add(&first_draw_, "row.first_draw", {n + 1});
    plan.add(&random_, "row.random", {limits.draws});
    plan.add(&drawn_, "drawn tokens", {limits.draws});
    plan.add(&drawn_logps_, "drawn log-probabilities", {limits.draws});
    if (limits.occurred == 0) return;
    plan.add(&first_occurred_, "row.first_occurred", {n + 1});
    plan.add(&occurred_, "row.occurred", {limits.occurred});
}

template <class Dev> void CachedGenerator<Dev>::next_logits(const Row &r, const CacheStep &step) {
    Memory &memory = decoder_.memory();
    DeviceRow &row = decoder_.row;
    const ModelConfig &config = decoder_.config;
    sequences_ = r.doc_offsets.size() - 1;
    all_finished(false);
    decoder_.begin_pass();
    row.load(r, memory);
    pass_ = step.prompts ? prompts : tokens;
    write(memory, slots_, step.slots);
    const X *last = decoder_.acts.normf;
    if (step.prompts) {
        row.split = split_row(config, {}, sizeof(X), r);
        row.load_first_keys(r, memory);
        std::vector<int32_t> ends(sequences_);
        for (size_t i = 0; i < sequences_; i++) ends[i] = int32_t(r.doc_offsets[i + 1]) - 1;
        write(memory, row.predictors, ends);
        last = last_;
    } else {
        const int32_t window = int32_t(*std::max_element(config.window.begin(), config.window.end()));
        std::vector<int32_t> first_key(sequences_);
        write(memory, row.first_key, first_key);
        for (size_t i = 0; i < sequences_; i++) first_key[i] = std::max(0, step.length[i] - window);
        write(memory, row.first_key_window, first_key);
        write(memory, table_, step.table);
        write(memory, length_, step.length);
    }
    decoder_.forward();
    decoder_.begin_op(Pass::forward, HEAD);
    if (step.prompts) embedding_forward(decoder_.dev, last_, decoder_.acts.normf, row.predictors, sequences_, config.C);
    matmul_forward(decoder_.dev, logits_, last, decoder_.head_w, (const X *)nullptr, sequences_, config.C, config.V,
                   logits_ld(decoder_.dev, config.V));
}

template <class Dev> bool CachedGenerator<Dev>::attention(size_t l, X *out, const AttentionInputs<X> &in) {
    const auto [T, H, KV, D, scale] = in.shape;
    cache_store(decoder_.dev, cache_[l], in.k, in.v, slots_, T, KV, D);
    if (pass_ == tokens)
        attention_decode(decoder_.dev, out, scratch_, in.q, cache_[l], table_, in.first_key, length_, T,
                         decoder_.limits.sequence_pages, H, KV, D, scale);
    return pass_ == tokens;
}

template <class Dev> std::vector<float> CachedGenerator<Dev>::logits() {
    const size_t V = decoder_.config.V, ld = logits_ld(decoder_.dev, V);
    auto out = read(decoder_.memory(), logits_, sequences_ * ld);
    for (size_t i = 1; i < sequences_; i++) std::copy_n(out.data() + i * ld, V, out.data() + i * V);  // without padding
    out.resize(sequences_ * V);
    return out;
}

template <class Dev> DrawnTokens CachedGenerator<Dev>::draw(const DrawRequest &r) {
    Memory &memory = decoder_.memory();
    const size_t n = r.random.size(), V = decoder_.config.V;
    const bool penalises = !r.occurred.empty();
    write(memory, first_draw_, r.first);
    write(memory, random_, r.random);
    if (penalises) write(memory, first_occurred_, r.first_occurred), write(memory, occurred_, r.occurred);
    sample(decoder_.dev, drawn_, r.logps ? drawn_logps_ : nullptr, logits_,
           Draws{first_draw_, random_, first_occurred_, penalises ? occurred_ : nullptr}, r.sampling, r.vocabulary, sequences_, V,
           logits_ld(decoder_.dev, V));
    return {read(memory, drawn_, n), r.logps ? read(memory, drawn_logps_, n) : std::vector<float>()};
}

template <class Dev> void CachedGenerator<Dev>::finish() {
    decoder_.row.T = 0;
    while (!all_finished(true)) decoder_.forward();
}

template <class Dev> void CachedGenerator<Dev>::copy_cache_page(size_t to, size_t from) {
    const size_t width = 2 * decoder_.config.KV * decoder_.config.D;
    for (X *cache : cache_)
        copy_rows(decoder_.dev, cache + to * cache_page * width, width, cache + from * cache_page * width, width, cache_page,
                  width);
}
