// Generation with a key/value cache: up to Pieces::capacity prompts at a time, their caches side by side like documents in a row.
// First all prompts go through the model in one packed row, then one token of each per step.
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "../core/common.h"
#include "../core/rng.h"
#include "../data/tokenizer.h"
#include "continuation.h"
#include "open.h"
#include "sampler.h"

using Ids = std::vector<int32_t>;

namespace {

struct Group {  // prompts that are generated together; prompt i has positions begin[i] .. begin[i+1] of the cache
    size_t first, count, prompt_tokens;
    std::vector<size_t> begin;
};

std::vector<Group> make_groups(const std::vector<Ids> &prompts, size_t max_new_tokens) {
    std::vector<Group> groups;
    for (size_t first = 0; first < prompts.size(); first += Pieces::capacity) {
        Group g{first, std::min(Pieces::capacity, prompts.size() - first), 0, {0}};
        for (size_t i = first; i < first + g.count; i++) {
            g.prompt_tokens += prompts[i].size();
            g.begin.push_back(g.begin.back() + prompts[i].size() + max_new_tokens);
        }
        groups.push_back(std::move(g));
    }
    return groups;
}

// Makes the row of the next tokens of the sequences `active`, and their positions in the cache. The first row holds the prompts, later ones
// the last token of each.
Row next_row(const Group &g, const std::vector<Ids> &sequences, const std::vector<size_t> &active, bool prompts, Pieces &where) {
    std::vector<Ids> documents;
    for (size_t i : active) documents.push_back(prompts ? sequences[i] : Ids{sequences[i].back()});
    Row row = make_row(documents);
    row.T = row.doc_offsets.back();  // leaves out the padding, since one token of each prompt is a short row
    where = {};
    for (size_t j = 0; j < active.size(); j++) {
        const size_t n = documents[j].size(), done = sequences[active[j]].size() - n, begin = g.begin[active[j]] + done,
                     offset = row.doc_offsets[j];
        where.piece[where.count++] = {begin, begin + n, offset};
        for (size_t t = 0; t < n; t++) row.doc_pos[offset + t] = int32_t(done + t);
    }
    return row;
}

struct GenerateSettings {
    size_t max_new_tokens;
    Sampling sampling;
    uint64_t seed;
};

// Returns the completion of each prompt, without the end-of-sequence token. Ranks take groups in turn and share the results.
std::vector<Ids> complete(Comm &comm, Model &model, const ModelConfig &config, const Tokenizer &tokenizer,
                          const std::vector<Ids> &prompts, const GenerateSettings &s) {
    const size_t vocab = std::min(config.V, tokenizer.size());  // some models have more rows than their tokenizer has tokens
    std::string own;  // the completions of this rank's groups: of each its length and its tokens
    const auto groups = make_groups(prompts, s.max_new_tokens);
    for (size_t number = size_t(comm.rank); number < groups.size(); number += size_t(comm.size)) {
        const Group &g = groups[number];
        std::vector<Ids> sequences(prompts.begin() + ptrdiff_t(g.first), prompts.begin() + ptrdiff_t(g.first + g.count));
        std::vector<int32_t> cache_begin;
        for (size_t i = 0; i < g.count; i++) cache_begin.resize(g.begin[i + 1], int32_t(g.begin[i]));
        std::vector<size_t> active(g.count);
        for (size_t i = 0; i < g.count; i++) active[i] = i;

        for (size_t n = 0; n < s.max_new_tokens && !active.empty(); n++) {
            Pieces where;
            const Row row = next_row(g, sequences, active, n == 0, where);
            const float *logits = model.next_logits(row, where, cache_begin);
            std::vector<size_t> still;
            for (size_t j = 0; j < active.size(); j++) {
                const size_t i = active[j];
                const double uniform = Random{s.seed, Purpose::sampling, uint32_t(g.first + i)}.uniform(n);
                const int32_t token = sample_token({logits + j * config.V, vocab}, s.sampling, uniform);
                sequences[i].push_back(token);
                if (std::find(config.eos.begin(), config.eos.end(), token) == config.eos.end()) still.push_back(i);
            }
            active = still;
        }
        for (size_t i = 0; i < g.count; i++) {
            Ids tail(sequences[i].begin() + ptrdiff_t(prompts[g.first + i].size()), sequences[i].end());
            if (!tail.empty() && std::find(config.eos.begin(), config.eos.end(), tail.back()) != config.eos.end())
                tail.pop_back();
            const int32_t length = int32_t(tail.size());
            own.append(reinterpret_cast<const char *>(&length), sizeof(length));
            own.append(reinterpret_cast<const char *>(tail.data()), tail.size() * sizeof(int32_t));
        }
    }
    const auto all = comm.gather(own);
    std::vector<size_t> at(all.size());
    std::vector<Ids> completions;
    for (size_t number = 0; number < groups.size(); number++)
        for (size_t i = 0; i < groups[number].count; i++) {
            const size_t rank = number % all.size();
            int32_t length = 0;
            memcpy(&length, all[rank].data() + at[rank], sizeof(length));
            Ids &tail = completions.emplace_back(size_t(length));
            if (length) memcpy(tail.data(), all[rank].data() + at[rank] + sizeof(length), tail.size() * sizeof(int32_t));
            at[rank] += (1 + tail.size()) * sizeof(int32_t);
        }
    return completions;
}

// Returns the prompts of --prompts, or the one of --prompt, as tokens.
std::vector<Ids> read_prompts(const Run &run) {
    const Options &o = run.options;
    const std::vector<std::string> text = {"--prompt=" + o.prompt};  // one word: a prompt may begin with a dash
    const std::string prepared = prepared_file(run, GENERATE, o.prompts, o.prompts.empty() ? text : std::vector<std::string>{});
    std::unique_ptr<PreparedData> data;
    agree(run.comm, [&] { data = open_data(run, prepared); });
    if (o.prompts.empty() && run.speaks()) std::filesystem::remove(prepared);  // it will not be needed again
    std::vector<Ids> prompts;
    for (size_t i = 0; i < data->documents(); i++) prompts.push_back(data->document(i).tokens);
    return prompts;
}

std::unique_ptr<Model> open_generator(const Run &run, const std::vector<Ids> &prompts, size_t max_new_tokens) {
    ModelLimits limits;
    limits.mode = Mode::generate;
    limits.row_tokens = row_multiple;
    for (const Group &g : make_groups(prompts, max_new_tokens)) {
        limits.row_tokens = std::max(limits.row_tokens, round_up(g.prompt_tokens, row_multiple));
        limits.cache_tokens = std::max(limits.cache_tokens, g.begin.back());
    }
    size_t longest = 0, most = run.config.max_positions;
    for (const Ids &prompt : prompts) longest = std::max(longest, prompt.size());
    agree(run.comm, [&] {
        if (longest + max_new_tokens > most && run.config.gpt2())  // rotary positions have no end, but learned ones do
            die("a prompt has %zu tokens and --max_new_tokens %zu may follow, but n_positions of %s is %zu\n  fix: a smaller --max_new_tokens, or a shorter prompt",
                longest, max_new_tokens, run.model_dir.c_str(), most);
    });
    if (longest + max_new_tokens > most)
        run.say("note: a prompt and its continuation may reach %zu tokens, max_position_embeddings is %zu",
                longest + max_new_tokens, most);
    limits.positions = std::max(longest + max_new_tokens, row_multiple);
    return open_model(run, limits);
}

}  // namespace

int generate(Run &run) {
    const Options &o = run.options;
    const std::vector<Ids> prompts = read_prompts(run);
    const auto model = open_generator(run, prompts, o.max_new_tokens);
    const Tokenizer tokenizer(run.model_dir + "/tokenizer.json");
    const auto completions =
        complete(run.comm, *model, run.config, tokenizer, prompts, {o.max_new_tokens, {o.temperature, o.top_k, o.top_p}, o.seed});
    if (!run.speaks()) return 0;
    for (size_t i = 0; i < prompts.size(); i++) {
        const std::string completion = tokenizer.decode(completions[i]);
        if (o.prompts.empty()) {
            printf("%s\n", completion.c_str());
            continue;
        }
        const nlohmann::ordered_json line = {
            {"prompt", tokenizer.decode(prompts[i])}, {"completion", completion}, {"tokens", completions[i].size()}};
        printf("%s\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
    }
    return 0;
}

// The targets of a document are the answer to the tokens before them. Returns the share of samples whose answer greedy decoding gives token by
// token; for a pair either answer counts. Shows the first few.
double exact_match(Run &run, const std::string &model_dir, const PreparedData &data, size_t show) {
    std::vector<Ids> prompts, answers;  // of samples; of documents
    size_t longest = 1;
    for (size_t i = 0; i < data.documents(); i++) {
        const auto [ids, mask] = data.document(i);
        const size_t answer = size_t(std::find(mask.begin(), mask.end(), 1) - mask.begin());
        size_t end = ids.size();
        while (end > answer &&
               (!mask[end - 1] || std::find(run.config.eos.begin(), run.config.eos.end(), ids[end - 1]) != run.config.eos.end()))
            end--;
        if (i == data.first(prompts.size())) prompts.emplace_back(ids.begin(), ids.begin() + ptrdiff_t(answer));
        answers.emplace_back(ids.begin() + ptrdiff_t(answer), ids.begin() + ptrdiff_t(end));
        longest = std::max(longest, ids.size() - answer + 1);
    }
    run.model_dir = model_dir;
    const auto model = open_generator(run, prompts, longest);
    const Tokenizer tokenizer(model_dir + "/tokenizer.json");
    const auto completions = complete(run.comm, *model, run.config, tokenizer, prompts, {longest, {}, 0});
    size_t right = 0;
    for (size_t s = 0; s < prompts.size(); s++) {
        const auto first = answers.begin() + ptrdiff_t(data.first(s)), last = answers.begin() + ptrdiff_t(data.first(s + 1));
        const bool found = std::find(first, last, completions[s]) != last;
        right += found;
        if (s < show)
            run.say("  %-40s -> %-16s %s", tokenizer.decode(prompts[s]).c_str(), tokenizer.decode(completions[s]).c_str(),
                    found ? "right" : ("wrong, " + tokenizer.decode(*first)).c_str());
    }
    return double(right) / double(prompts.size());
}

// ---- while training -------------------------------------------------------------------------------------------------------------------

Continuation::Continuation(const Run &run) : run_(run) {
    const Options &o = run.options;
    const ModelConfig &c = run.config;
    const std::string model = run.model_dir.empty() ? "a --preset" : run.model_dir;
    agree(run.comm, [&] {
        if (run.tokenizer_hash.empty())
            die("--sample_every shows text, but %s has no tokenizer.json\n  fix: --model DIR with a tokenizer, or leave --sample_every out",
                model.c_str());
        if (o.prompt.empty() && c.bos < 0 && c.eos.empty())
            die("config.json of %s has neither bos_token_id nor eos_token_id, with which a text could begin\n  fix: --prompt TEXT",
                model.c_str());
        tokenizer_.emplace(run.model_dir + "/tokenizer.json");
    });
    prompt_ = !o.prompt.empty() ? read_prompts(run)[0] : Ids{c.bos >= 0 ? c.bos : c.eos[0]};
    agree(run.comm, [&] {
        if (prompt_.size() + o.max_new_tokens > c.max_positions)
            die("the prompt has %zu tokens and --max_new_tokens %zu may follow, but %s has %zu positions\n  fix: a smaller --max_new_tokens%s",
                prompt_.size(), o.max_new_tokens, model.c_str(), c.max_positions,
                o.prompt.empty() ? "" : ", or a shorter --prompt");
    });
}

void Continuation::use(ModelLimits &limits) const {
    limits.cache_tokens = prompt_.size() + run_.options.max_new_tokens;
    limits.positions = std::max(limits.positions, limits.cache_tokens);
    // In a ring, too, one rank alone computes it, though its arrays have room for its part of a row only.
    limits.row_tokens = std::max(limits.row_tokens, round_up(prompt_.size(), row_multiple) * run_.ranks.sp);
}

std::string Continuation::text(Model &model, size_t step) const {
    const Options &o = run_.options;
    const uint64_t seed = Random{o.seed, Purpose::sampling, 0}.bits(step);
    model.gather_parameters();
    return tokenizer_->decode(complete(run_.comm, model, run_.config, *tokenizer_, {prompt_},
                                       {o.max_new_tokens, {o.temperature, o.top_k, o.top_p}, seed})[0]);
}
