#include "rehearsal.h"

#include <algorithm>

void Touches::watch(const Plan &plan) {
    const auto &segments = plan.segments();
    lifetimes_.assign(segments.size(), {});
    for (size_t i = 0; i < segments.size(); i++)
        ranges_.push_back({base + segments[i].offset, base + segments[i].offset + segments[i].bytes, i});
    std::ranges::sort(ranges_, {}, &Range::begin);
    for (size_t begin = 0; const auto &[name, bytes] : plan.places()) places_.push_back(std::exchange(begin, begin + bytes));
}

void Touches::begin_row() {
    now_ = none;
    events_.push_back({.kind = Event::row});
}

void Touches::begin(OpKey op, bool in_order, size_t bucket) {
    op_ = op, op_event_ = events_.size();
    events_.push_back({.kind = Event::op, .key = op, .amount = bucket});
    const auto [at, is_new] = times_.insert({op, calls * times_.size()});
    if (in_order && now_ != none && at->second < now_ / calls * calls)
        loops_.push_back({at->second, now_ / calls * calls + calls - 1});
    now_ = at->second;
}

void Touches::pause(OpKey transfer, size_t bucket) {
    op_ = transfer, op_event_ = events_.size();
    events_.push_back({.kind = Event::pause, .key = transfer, .amount = bucket});
    if (now_ != none) now_++;
}

size_t Touches::start(Event event) {
    event.key = op_, event.id = ++transfers_;
    events_.push_back(event);
    return transfers_;
}

size_t Touches::start_message(size_t bytes, size_t ranks, size_t distance) {
    return start({.kind = Event::start, .amount = bytes, .ranks = ranks, .distance = distance});
}

size_t Touches::start_copy(Event::Lane lane, size_t place) {
    return start(
        {.kind = Event::start, .lane = lane, .amount = size_t(std::ranges::lower_bound(places_, place) - places_.begin())});
}

void Touches::touch(std::span<const void *const> addresses) {
    if (now_ == none) return;
    const bool in_pause = now_ % calls > 0;
    now_ += in_pause;
    for (const void *address : addresses) {
        const uintptr_t a = uintptr_t(address);
        const auto behind = std::ranges::upper_bound(ranges_, a, {}, &Range::begin);
        if (behind == ranges_.begin() || a >= behind[-1].end) continue;  // null, or an array of the host
        Lifetime &l = lifetimes_[behind[-1].segment];
        if (now_ < l.first) l.first = now_, l.in_pause = in_pause;
        l.last = std::max(l.last, now_);
    }
}

// Closes the loops and numbers the times from 0 on.
void Touches::finish() {
    std::ranges::sort(loops_);
    loops_.erase(std::unique(loops_.begin(), loops_.end()), loops_.end());  // once for all tiles
    for (bool grows = true; grows;) {
        grows = false;
        for (auto [begin, end] : loops_)
            for (Lifetime &l : lifetimes_) {
                if (!l.touched() || l.last < begin || end < l.first || (l.first <= begin && end <= l.last)) continue;
                l.first = std::min(l.first, begin), l.last = std::max(l.last, end), grows = true;
            }
    }
    std::vector<size_t> all;
    for (const auto &[op, time] : times_) all.push_back(time);
    for (const Lifetime &l : lifetimes_)
        if (l.touched()) all.push_back(l.first), all.push_back(l.last);
    std::ranges::sort(all);
    all.erase(std::unique(all.begin(), all.end()), all.end());
    const auto number = [&](size_t time) { return size_t(std::ranges::lower_bound(all, time) - all.begin()); };
    for (auto &[op, time] : times_) time = number(time);
    for (Lifetime &l : lifetimes_)
        if (l.touched()) l.first = number(l.first), l.last = number(l.last);
}
