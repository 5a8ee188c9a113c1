#include "generation.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>

#include "../core/common.h"
#include "../core/rng.h"
#include "../core/signals.h"
#include "../ops/settings.h"

namespace {

// The pages of the cache, or the slots for states. A shared page is freed when its last sequence releases it.
class Pages {
  public:
    explicit Pages(size_t count) : users_(count) {
        for (size_t i = count; i-- > 0;) free_.push_back(int32_t(i));
    }
    size_t free() const { return free_.size(); }
    int32_t take() {
        const int32_t page = free_.back();
        free_.pop_back();
        users_[size_t(page)] = 1;
        return page;
    }
    int32_t share(int32_t page) { return users_[size_t(page)]++, page; }
    void release(std::vector<int32_t> &pages) {
        for (int32_t page : pages)
            if (--users_[size_t(page)] == 0) free_.push_back(page);
        pages.clear();
    }

  private:
    std::vector<size_t> users_;
    std::vector<int32_t> free_;
};

// What a sequence has of the cache.
struct Held {
    std::vector<int32_t> pages = {};
    std::vector<int32_t> state = {};  // one slot
};

// What is known of an answer besides its tokens.
struct Answer {
    std::vector<double> logp = {};  // of the sampled tokens
    std::vector<uint8_t> mask = {};
    size_t turns = 0, turn_begin = 0;  // turns before this one; the answer's tokens before it
    bool ended = false, stopped = false;
    std::vector<double> turn_rewards = {};
    size_t calls = 0, failures = 0;
};

struct Sequence {
    size_t prompt, sample;
    std::vector<int32_t> tokens;  // the prompt's tokens, then the answer's
    size_t cached;                // of them are in the cache; the others are computed next
    Held held;
    Answer answer;
};

struct Drawn {
    int32_t token;
    double logp;
};

// An entry of the queue: a prompt whose samples `next`, ..., samples - 1 have not begun, or a preempted sequence.
struct Waiting {
    size_t prompt, next, samples;
    std::vector<int32_t> tokens;
    Answer answer = {};
    Held held = {};                // of its tokens, once they have been computed
    std::deque<Drawn> drawn = {};  // then also the next token of samples `next`, ..., samples - 1
};

class Engine {
  public:
    Engine(Generator &generator, const GenerationLimits &limits, std::span<const Prompt> prompts,
           const GenerationSettings &settings)
        : generator_(generator),
          limits_(limits),
          prompts_(prompts),
          settings_(settings),
          pages_(limits.pages),
          states_(state_slots(limits.sequences)) {
        for (size_t i = 0; i < prompts.size(); i++) waiting_.push_back({i, 0, settings.samples, prompts[i].tokens});
        completions_.resize(prompts.size() * settings.samples);
    }

    std::vector<Completion> run(const std::function<void(size_t, size_t)> &progress) {
        const Activity activity("after this token");
        const auto wants_to_stop = [&] { return asked_to_stop() || (settings_.environment && settings_.environment->failed()); };
        while (!(waiting_.empty() && running_.empty() && asking_.empty()) && !generator_.stops(wants_to_stop())) {
            compute_prompts();
            begin_sequences();
            decode();
            hear();
            if (progress) progress(finished_, tokens_);
        }
        return std::move(completions_);
    }

  private:
    static size_t pages_for(size_t tokens) { return ceil_div(tokens, cache_page); }
    size_t capacity() const { return limits_.sequences - running_.size() - asking_.size(); }
    void release(Held &held) { pages_.release(held.pages), states_.release(held.state); }

    // Computes prompts from the head of the queue, as far as they fit into a row and there are free pages and slots.
    void compute_prompts() {
        if (waiting_.empty()) return;
        if (running_.empty() && waiting_.front().drawn.empty()) {  // the first in the queue may use all pages
            for (Waiting &w : waiting_) release(w.held), w.drawn.clear();
            while (capacity() > 0 && pages_.free() < pages_for(waiting_.front().tokens.size())) release_one();
        }
        std::vector<Waiting *> row;
        std::vector<std::vector<int32_t>> documents;
        size_t tokens = 0, samples = 0;
        for (Waiting &w : waiting_) {
            if (!w.drawn.empty()) {
                samples += w.samples - w.next;
                continue;
            }
            tokens += w.tokens.size();
            const bool fits = tokens <= limits_.row_tokens() && pages_for(w.tokens.size()) < pages_.free() + running_.empty();
            if (samples >= capacity() || documents.size() == limits_.sequences || !fits || states_.free() == 0) break;
            for (size_t i = 0; i < pages_for(w.tokens.size()); i++) w.held.pages.push_back(pages_.take());
            w.held.state.push_back(states_.take());
            samples += w.samples - w.next;
            row.push_back(&w), documents.push_back(w.tokens);
        }
        if (row.empty()) return;
        const Row packed = make_row(documents);
        CacheStep step{true, std::vector<int32_t>(packed.T, -1), {}, {}, std::vector<int32_t>(packed.T, -1)};
        for (size_t i = 0; i < row.size(); i++) {
            const Held &held = row[i]->held;
            for (size_t t = 0; t < documents[i].size(); t++) step.slots[packed.doc_offsets[i] + t] = slot(held.pages, t);
            step.states[packed.doc_offsets[i + 1] - 1] = held.state[0];
        }
        generator_.next_logits(packed, step);
        DrawRequest request = no_draws();
        for (const Waiting *w : row) {
            for (size_t sample = w->next; sample < w->samples; sample++) add_draw(request, w->prompt, sample, w->tokens.size());
            end_row(request, w->tokens);
        }
        const std::vector<Drawn> drawn = draw(request);
        for (size_t i = 0; i < row.size(); i++)
            row[i]->drawn.assign(drawn.begin() + request.first[i], drawn.begin() + request.first[i + 1]);
    }

    static int32_t slot(const std::vector<int32_t> &pages, size_t position) {
        return int32_t(size_t(pages[position / cache_page]) * cache_page + position % cache_page);
    }

    // Begins sequences from computed prompts, while there is room. The last sample takes over the prompt's pages and its slot.
    void begin_sequences() {
        while (!waiting_.empty() && !waiting_.front().drawn.empty() && capacity() > 0) {
            Waiting &w = waiting_.front();
            Sequence s{w.prompt, w.next, w.tokens, w.tokens.size(), {}, w.answer};
            const bool last = w.next + 1 == w.samples, partial = w.tokens.size() % cache_page != 0;
            const bool has_room = pages_.free() >= partial && states_.free() > 0;
            const Drawn drawn = w.drawn.front();
            w.drawn.pop_front();
            // Without room for a copy the prompt is recomputed for the next sample.
            if (last || !has_room) {
                s.held = std::exchange(w.held, {});
                w.drawn.clear();
            } else {
                const std::vector<int32_t> &from = w.held.pages;
                std::vector<int32_t> &pages = s.held.pages;
                for (size_t i = 0; i + partial < from.size(); i++) pages.push_back(pages_.share(from[i]));
                if (partial) {
                    pages.push_back(pages_.take());
                    generator_.copy_cache_page(size_t(pages.back()), size_t(from.back()));
                }
                s.held.state.push_back(states_.take());
                generator_.copy_state(size_t(s.held.state[0]), size_t(w.held.state[0]));
            }
            w.next++;
            if (last) waiting_.pop_front();
            if (!add(s, drawn)) running_.push_back(std::move(s));
        }
    }

    DrawRequest no_draws() const { return {settings_.sampling, settings_.vocabulary, settings_.logps}; }

    // Requests the next token of a sample with `tokens` tokens, including its prompt.
    void add_draw(DrawRequest &request, size_t prompt, size_t sample, size_t tokens) const {
        const Prompt &p = prompts_[prompt];
        const uint32_t stream = uint32_t(p.number * settings_.samples + sample);
        request.random.push_back(Random{settings_.seed, Purpose::sampling, stream}.bits(tokens - p.tokens.size()));
    }

    void end_row(DrawRequest &request, const std::vector<int32_t> &tokens) const {
        request.first.push_back(int32_t(request.random.size()));
        if (settings_.sampling.repetition_penalty == 1) return;
        const std::set<int32_t> distinct(tokens.begin(), tokens.end());
        request.occurred.insert(request.occurred.end(), distinct.begin(), distinct.end());
        request.first_occurred.push_back(int32_t(request.occurred.size()));
    }

    std::vector<Drawn> draw(const DrawRequest &request) {
        const DrawnTokens drawn = generator_.draw(request);
        std::vector<Drawn> out;
        for (size_t i = 0; i < drawn.tokens.size(); i++)
            out.push_back({drawn.tokens[i], settings_.logps ? double(drawn.logps[i]) : 0});
        return out;
    }

    size_t number_of(const Sequence &s) const { return s.prompt * settings_.samples + s.sample; }
    std::span<const int32_t> answer_of(const Sequence &s) const {
        return std::span(s.tokens).subspan(prompts_[s.prompt].tokens.size());
    }

    // Appends a sampled token. Returns true if the sequence does not go on now: its turn has ended.
    bool add(Sequence &s, Drawn drawn) {
        const int32_t token = drawn.token;
        s.tokens.push_back(token), s.answer.mask.push_back(1);
        if (settings_.logps) s.answer.logp.push_back(drawn.logp);
        tokens_++;
        const auto answer = answer_of(s);
        const auto turn = answer.subspan(s.answer.turn_begin);
        const bool is_end = token == no_token || std::ranges::find(settings_.eos, token) != settings_.eos.end();
        s.answer.stopped = !is_end && settings_.stop.end(turn);
        s.answer.ended = is_end || s.answer.stopped;
        if (!s.answer.ended && answer.size() < settings_.max_new_tokens) return false;
        if (!settings_.environment || token == no_token) return end(s), true;
        settings_.environment->act(
            {number_of(s), s.answer.turns, turn, s.answer.ended, s.answer.stopped, settings_.max_new_tokens - answer.size()});
        asking_.push_back(std::move(s));
        return true;
    }

    // Ends a sequence. Its pages and its slot are then free.
    void end(Sequence &s) {
        const auto answer = answer_of(s);
        Answer &a = s.answer;
        completions_[number_of(s)] = {{answer.begin(), answer.end()}, a.ended, a.stopped, std::move(a.logp), std::move(a.mask),
                                      std::move(a.turn_rewards),      a.calls, a.failures};
        release(s.held);
        finished_++;
    }

    // Continues or ends the episodes whose environments have replied.
    void hear() {
        if (asking_.empty()) return;
        const bool is_idle = running_.empty() && (waiting_.empty() || capacity() == 0);
        for (const Reply &reply : settings_.environment->replies(is_idle)) {
            const auto at = std::ranges::find(asking_, reply.episode, [&](const Sequence &s) { return number_of(s); });
            Sequence s = std::move(*at);
            asking_.erase(at);
            Answer &a = s.answer;
            a.turn_rewards.push_back(reply.reward), a.calls += reply.calls, a.failures += reply.failures;
            if (reply.observation.empty()) {
                a.ended = a.ended && !reply.truncated;
                end(s);
                continue;
            }
            s.tokens.insert(s.tokens.end(), reply.observation.begin(), reply.observation.end());
            a.mask.resize(a.mask.size() + reply.observation.size(), 0);
            a.turn_begin = answer_of(s).size(), a.turns++;
            if (s.held.pages.empty()) queue(s);
            else running_.push_back(std::move(s));
        }
    }

    // Puts a sequence without pages at the head of the queue, with all its tokens.
    void queue(Sequence &s) { waiting_.push_front({s.prompt, s.sample, s.sample + 1, std::move(s.tokens), std::move(s.answer)}); }

    // Makes sure that each running sequence has pages for its tokens.
    void take_pages() {
        for (size_t i = 0; i < running_.size(); i++)
            while (i < running_.size() && running_[i].held.pages.size() < pages_for(running_[i].tokens.size()))
                if (pages_.free() > 0) running_[i].held.pages.push_back(pages_.take());
                else release_one();
    }

    // Frees the pages of a prompt in the queue, of an episode that waits for its environment, or of the sequence that was admitted last.
    void release_one() {
        for (Waiting &w : waiting_)
            if (!w.held.pages.empty()) return release(w.held), w.drawn.clear();
        for (Sequence &s : asking_)
            if (!s.held.pages.empty()) return release(s.held);
        release(running_.back().held);
        queue(running_.back());
        running_.pop_back();
    }

    // Computes the newest tokens of each running sequence, and draws the next one where none is left to compute.
    void decode() {
        take_pages();
        if (running_.empty()) return;
        const size_t B = running_.size(), width = limits_.sequence_pages;
        Row row{};
        CacheStep step{false, {}, {}, {}};
        DrawRequest request = no_draws();
        size_t further = limits_.appended;
        for (size_t b = 0; b < B; b++) {
            Sequence &s = running_[b];
            const size_t end = std::min(s.tokens.size(), s.cached + 1 + further);
            further -= end - s.cached - 1;
            row.doc_offsets.push_back(row.T);
            for (; s.cached < end; s.cached++, row.T++) {
                row.tokens.push_back(s.tokens[s.cached]);
                row.doc_pos.push_back(int32_t(s.cached));
                step.slots.push_back(slot(s.held.pages, s.cached));
                step.states.push_back(s.held.state[0]);
                step.table.resize((row.T + 1) * width);
                std::ranges::copy(s.held.pages, step.table.begin() + ptrdiff_t(row.T * width));
                step.length.push_back(int32_t(s.cached + 1));
            }
            if (is_computed(s)) add_draw(request, s.prompt, s.sample, s.tokens.size());
            end_row(request, s.tokens);
        }
        row.doc_offsets.push_back(row.T);
        generator_.next_logits(row, step);
        const std::vector<Drawn> drawn = request.random.empty() ? std::vector<Drawn>() : draw(request);
        std::vector<Sequence> still;
        auto next = drawn.begin();
        for (Sequence &s : running_)
            if (!is_computed(s) || !add(s, *next++)) still.push_back(std::move(s));
        running_ = std::move(still);
    }
    static bool is_computed(const Sequence &s) { return s.cached == s.tokens.size(); }

    Generator &generator_;
    const GenerationLimits &limits_;
    std::span<const Prompt> prompts_;
    const GenerationSettings &settings_;
    Pages pages_, states_;
    std::deque<Waiting> waiting_;
    std::vector<Sequence> running_;  // in the order of admission
    std::vector<Sequence> asking_;   // episodes that wait for their environments, with their pages as long as there are others
    std::vector<Completion> completions_;
    size_t finished_ = 0, tokens_ = 0;
};

}  // namespace

GenerationLimits::GenerationLimits(std::span<const Prompt> prompts, const GenerationSettings &s, size_t most)
    : sequences(std::max<size_t>(1, std::min(most, prompts.size() * s.samples))),
      longest_prompt(1),
      prompt_tokens(0),
      draws(sequences * s.samples) {
    for (const Prompt &p : prompts) longest_prompt = std::max(longest_prompt, p.tokens.size()), prompt_tokens += p.tokens.size();
    longest_prompt += s.prompt_growth;
    longest = longest_prompt + s.max_new_tokens;
    sequence_pages = ceil_div(longest, cache_page);
    pages = sequences * sequence_pages;
    occurred = s.sampling.repetition_penalty == 1 ? 0 : sequences * longest;
}

size_t GenerationLimits::row_tokens() const {
    const bool preempts = pages < sequences * sequence_pages;
    return round_up(std::max(preempts ? longest : longest_prompt, std::min<size_t>(prompt_tokens, 2048)), row_multiple);
}

void GenerationLimits::use(ModelLimits &limits, size_t sp) const {
    limits.cache_pages = pages, limits.sequences = sequences, limits.sequence_pages = sequence_pages;
    limits.draws = draws, limits.occurred = occurred, limits.appended = appended;
    limits.row_tokens = std::max(limits.row_tokens, sp * std::max(row_tokens(), round_up(sequences + appended, row_multiple)));
    limits.positions = std::max(limits.positions, sequence_pages * cache_page);
}

std::string text_of(const Completion &completion, const Tokenizer &tokenizer, const StopStrings &stop) {
    return stop.before(tokenizer.decode(completion.answer()));
}

std::function<void(size_t, size_t)> told_progress(size_t total, std::function<void(const std::string &)> tell) {
    const auto began = std::chrono::steady_clock::now();
    return [=, told = began](size_t finished, size_t tokens) mutable {
        const auto now = std::chrono::steady_clock::now();
        if (now - told < std::chrono::seconds(10)) return;
        told = now;
        tell(format("  %zu of %zu completions, %zu tokens, %.0f tokens/s", finished, total, tokens,
                    double(tokens) / std::chrono::duration<double>(now - began).count()));
    };
}

std::vector<Completion> generate(Generator &generator, const GenerationLimits &limits, std::span<const Prompt> prompts,
                                 const GenerationSettings &settings, const std::function<void(size_t, size_t)> &progress) {
    return Engine(generator, limits, prompts, settings).run(progress);
}

std::vector<Prompt> own_prompts(Comm &comm, size_t tp, std::span<const std::vector<int32_t>> prompts, uint32_t first) {
    std::vector<Prompt> own;
    for (size_t i = size_t(comm.rank) / tp; i < prompts.size(); i += size_t(comm.size) / tp)
        own.push_back({prompts[i], first + uint32_t(i)});
    return own;
}

// Conversions between values and bytes.
template <class T> static void append(std::string &bytes, const T *values, size_t n) {
    bytes.append(reinterpret_cast<const char *>(values), n * sizeof(T));
}
template <class T> static std::vector<T> take(const char *&at, size_t n) {
    std::vector<T> values(n);
    if (n) memcpy(values.data(), at, n * sizeof(T));
    at += n * sizeof(T);
    return values;
}

std::vector<Completion> share_completions(Comm &comm, size_t tp, std::span<const Completion> own, size_t prompts,
                                          size_t samples) {
    std::string bytes;
    for (const Completion &c : size_t(comm.rank) % tp ? std::span<const Completion>() : own) {
        const int32_t head[] = {int32_t(c.tokens.size()),       c.ended,          c.stopped,           int32_t(c.logp.size()),
                                int32_t(c.turn_rewards.size()), int32_t(c.calls), int32_t(c.failures), int32_t(c.prompt.size())};
        append(bytes, head, std::size(head)), append(bytes, c.tokens.data(), c.tokens.size());
        append(bytes, c.logp.data(), c.logp.size()), append(bytes, c.mask.data(), c.mask.size());
        append(bytes, c.turn_rewards.data(), c.turn_rewards.size()), append(bytes, c.prompt.data(), c.prompt.size());
    }
    const auto all = comm.gather(bytes);
    std::vector<const char *> at;
    for (const std::string &of_rank : all) at.push_back(of_rank.data());
    std::vector<Completion> out;
    for (size_t i = 0; i < prompts * samples; i++) {
        const char *&next = at[i / samples % (all.size() / tp) * tp];
        const auto head = take<int32_t>(next, 8);
        const auto tokens = take<int32_t>(next, size_t(head[0]));
        const auto logp = take<double>(next, size_t(head[3]));
        const auto mask = take<uint8_t>(next, tokens.size());
        const auto turn_rewards = take<double>(next, size_t(head[4]));
        const auto prompt = take<int32_t>(next, size_t(head[7]));
        out.push_back({tokens, head[1] != 0, head[2] != 0, logp, mask, turn_rewards, size_t(head[5]), size_t(head[6]), prompt});
    }
    agree(comm, [&] {
        for (size_t i = 0; i < out.size(); i++)
            if (out[i].tokens.back() == no_token)
                die("token %zu of the answer to prompt %zu cannot be sampled: its logits are not finite\n  fix: look for NaN and for huge numbers in the weights; if they were just trained, lower the learning rate",
                    out[i].tokens.size(), i / samples + 1);
    });
    return out;
}
