// The world of episodes, which are answers of several turns. To each turn that a policy has sampled it replies with a reward and an observation, which the
// policy reads before its next turn; or it ends the episode.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

struct Turn {
    size_t episode, number;           // counted from 0; turn 0 begins an episode
    std::span<const int32_t> tokens;  // with the token that ended it
    bool ended, stopped;              // as in Completion. A turn that has not ended is the episode's last
    size_t room;                      // tokens that the episode may still have
};

struct Reply {
    size_t episode;
    std::vector<int32_t> observation;  // fewer tokens than Turn::room. None: the episode has ended
    double reward;                     // of the turn, or no_reward
    bool truncated;                    // the episode has ended only because its observation did not fit
    size_t calls = 0, failures = 0;    // of tools, by the turn
};

class Environment {
  public:
    virtual ~Environment() = default;
    virtual void act(const Turn &turn) = 0;
    // Returns replies to turns, one to each, in any order. If it may `wait`, it returns at the next reply, or without one after a moment.
    virtual std::vector<Reply> replies(bool wait) = 0;
    virtual bool failed() const { return false; }  // true: it will not reply any more, and the answers are of no use
};
