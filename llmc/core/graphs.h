// Repeated launches (--cuda_graphs): a stretch of a model's work is recorded once and then replayed by one call, so the host and the driver spend no
// time on each of its launches.
#pragma once
#include <compare>
#include <functional>
#include <memory>

#include "device.h"

class Graphs {
  public:
    // The key of recorded launches: every value they depend on. Other data of a row, such as tokens and first visible keys, is in device memory.
    struct Stretch {
        size_t layer;
        int pass;         // the number of a function of a layer
        size_t T;         // tokens of the row
        bool accumulate;  // true if products add to the gradients
        auto operator<=>(const Stretch &) const = default;
    };

    virtual ~Graphs() = default;

    // When a stretch first occurs, calls `work`, which must only launch kernels: this call loads kernels and chooses algorithms. The second call is
    // recorded, and later its launches are replayed without calling `work`.
    virtual void run(const Stretch &stretch, const std::function<void()> &work) = 0;
};

template <class X> std::unique_ptr<Graphs> make_graphs(Cpu<X>) { return nullptr; }  // a CPU has no launches
