// Launches that repeat (--cuda_graphs): a stretch of a model's work is recorded once and from then on replayed by one call, so that the host and
// the driver spend no time on each of its launches.
#pragma once
#include <compare>
#include <functional>
#include <memory>

#include "device.h"

class Graphs {
  public:
    // Key of a recorded sequence of launches: every value they depend on. Other data of a row, such as tokens and first visible keys, is in device memory.
    struct Stretch {
        size_t layer;
        int pass;         // a number for each function of a layer
        size_t T;         // tokens of the row
        bool accumulate;  // whether products add to the gradients
        auto operator<=>(const Stretch &) const = default;
    };

    virtual ~Graphs() = default;

    // Calls `work`, which only launches kernels, when a stretch first occurs: this call loads kernels and chooses algorithms. The second call is
    // recorded, and from then on its launches are replayed without calling `work`.
    virtual void run(const Stretch &stretch, const std::function<void()> &work) = 0;
};

template <class X> std::unique_ptr<Graphs> make_graphs(Cpu<X>) { return nullptr; }  // calls are all that a CPU has to do
