// A watchdog's record of the calls queued on a stream, which run in order when the device reaches them.
//
// The host runs far ahead of the device, so the time since a call was queued means nothing: healthy steps of long rows take longer than any
// limit. The clock of a call starts when the call could start, after all work queued before it; an event before the call shows that.
#pragma once
#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>

template <class Event> struct WatchedCalls {
    using Clock = std::chrono::steady_clock;
    struct Call {
        uint64_t id;
        std::string what;
        Event begins, done;                      // on the stream, before and after the call
        bool queued = false;                     // false: the host has not returned from it yet, and `done` is not on the stream
        std::optional<Clock::time_point> since;  // when the watchdog first saw that the call could start
    };
    std::deque<Call> calls;  // calls that may not be done

    // Removes the calls that are done, after release(call). Returns the first remaining call if it could have started `timeout` ago, or null.
    // reached(event) returns true if the device has reached the event; it throws the device's error if there is one.
    template <class Reached, class Release>
    const Call *late(Clock::time_point now, std::chrono::duration<double> timeout, Reached reached, Release release) {
        while (!calls.empty() && calls.front().queued && reached(calls.front().done)) release(calls.front()), calls.pop_front();
        if (calls.empty()) return nullptr;
        Call &first = calls.front();
        if (!first.since && reached(first.begins)) first.since = now;
        return first.since && now - *first.since > timeout ? &first : nullptr;
    }
};
