// A communicator that runs started collectives as late as possible, in wait(). A caller that does not wait, or accesses their slices before, gets
// other results.
#pragma once
#include "wrapped_comm.h"

class LateComm final : public WrappedComm {
  public:
    using WrappedComm::WrappedComm;
    Request start(const std::function<void()> &f) override {
        late_ = true;
        f();
        late_ = false;
        return Request(this, calls_.size());
    }

  protected:
    void do_all_reduce_sum(Slice data) override {
        make([=, this] { WrappedComm::do_all_reduce_sum(data); });
    }
    void do_reduce_scatter_sum(Slice send, Slice recv) override {
        make([=, this] { WrappedComm::do_reduce_scatter_sum(send, recv); });
    }
    void do_all_gather(Slice send, Slice recv) override {
        make([=, this] { WrappedComm::do_all_gather(send, recv); });
    }
    void do_wait(uint64_t id) override { calls_[id - 1](); }

  private:
    void make(const std::function<void()> &call) {
        if (late_) calls_.push_back(call);
        else call();
    }

    bool late_ = false;
    std::vector<std::function<void()>> calls_;  // one for each start()
};
