// A communicator whose collectives are made as late as those of a GPU may be.
#pragma once
#include "../llmc/parallel/comm.h"

// What was started is done at the last moment, as it may be on a GPU.
class LateComm final : public Comm {
  public:
    explicit LateComm(Comm &comm) : Comm(comm.rank, comm.size), comm_(comm) { memory = comm.memory; }
    Request start(const std::function<void()> &f) override {
        late_ = true;
        f();
        late_ = false;
        return Request(this, calls_.size());
    }

  protected:
    void do_all_reduce_sum(Slice data) override {
        make([=, this] { comm_.all_reduce_sum(data); });
    }
    void do_reduce_scatter_sum(Slice send, Slice recv) override {
        make([=, this] { comm_.reduce_scatter_sum(send, recv); });
    }
    void do_all_gather(Slice send, Slice recv) override {
        make([=, this] { comm_.all_gather(send, recv); });
    }
    void do_all_to_all(Slice, Slice) override { die("not needed here"); }
    void do_broadcast(Slice, int) override { die("not needed here"); }
    Request do_exchange(Slice, int, Slice, int) override { die("not needed here"); }
    void do_wait(uint64_t id) override { calls_[id - 1](); }
    void withdraw(uint64_t) noexcept override {}
    std::unique_ptr<Comm> do_split(int color, int key) override { return comm_.split(color, key); }
    void gather_host(const void *own, size_t bytes, void *all) override {
        const std::string text(static_cast<const char *>(own), bytes);
        for (const std::string &t : comm_.gather(text)) memcpy(all, t.data(), bytes), all = static_cast<char *>(all) + bytes;
    }

  private:
    void make(const std::function<void()> &call) {
        if (late_) calls_.push_back(call);
        else call();
    }

    Comm &comm_;
    bool late_ = false;
    std::vector<std::function<void()>> calls_;  // one of each start()
};
