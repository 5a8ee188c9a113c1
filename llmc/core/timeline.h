// Measures the times at which a device reaches marks. A model queues its ops on a device, and marks are queued among them.
#pragma once
#include <chrono>
#include <memory>
#include <vector>

#include "device.h"

class Timeline {
  public:
    virtual ~Timeline() = default;

    virtual void mark(const char *next) = 0;  // `next` names the following work, for tools that draw a timeline; null: no work
    virtual std::vector<double> take() = 0;   // seconds between marks since the last call; waits for the device
};

class HostTimeline final : public Timeline {  // on a CPU an op has ended when its call returns
  public:
    void mark(const char *) override { marks_.push_back(std::chrono::steady_clock::now()); }
    std::vector<double> take() override {
        std::vector<double> seconds;
        for (size_t i = 1; i < marks_.size(); i++)
            seconds.push_back(std::chrono::duration<double>(marks_[i] - marks_[i - 1]).count());
        marks_.clear();
        return seconds;
    }

  private:
    std::vector<std::chrono::steady_clock::time_point> marks_;
};

template <class X> std::unique_ptr<Timeline> make_timeline(Cpu<X>) { return std::make_unique<HostTimeline>(); }
