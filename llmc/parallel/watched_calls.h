// What a watchdog knows of calls that were queued on a stream, one behind the other, and run when the device comes to them.
//
// The host runs far ahead of the device, so the time since a call was queued says nothing: healthy steps of long rows take longer than any
// limit. The clock of a call starts when it could start: when all that was queued before it is done, which an event in front of it tells.
#pragma once
#include <chrono>
#include <deque>
#include <optional>
#include <string>

template <class Event> struct WatchedCalls {
    using Clock = std::chrono::steady_clock;
    struct Call {
        uint64_t id;
        std::string what;
        Event begins, done;                      // on the stream in front of the call and behind it
        bool queued = false;                     // false: the host has not returned from it yet, and `done` is not on the stream
        std::optional<Clock::time_point> since;  // when it was first seen that the call could start
    };
    std::deque<Call> calls;  // that are not yet known to have been done

    // Removes the calls that are done, after release(call). Returns the first other one if it could have started `timeout` ago, or null.
    // reached(event): whether the device has come to the event; it throws the device's error if there is one.
    template <class Reached, class Release>
    const Call *late(Clock::time_point now, std::chrono::duration<double> timeout, Reached reached, Release release) {
        while (!calls.empty() && calls.front().queued && reached(calls.front().done)) release(calls.front()), calls.pop_front();
        if (calls.empty()) return nullptr;
        Call &first = calls.front();
        if (!first.since && reached(first.begins)) first.since = now;
        return first.since && now - *first.since > timeout ? &first : nullptr;
    }
};
