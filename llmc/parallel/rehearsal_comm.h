// A communicator that sends nothing, for a rehearsal (../core/rehearsal.h): slices are touched when a call begins, and when it is waited for.
#pragma once
#include <cstring>
#include <map>
#include <vector>

#include "../core/rehearsal.h"
#include "comm.h"

class RehearsalComm final : public Comm {
  public:
    // splits: the sizes of the communicators that a mesh asks for, in its order
    RehearsalComm(Touches &log, int rank, int size, std::vector<int> splits = {})
        : Comm(rank, size), log_(log), splits_(std::move(splits)) {
        memory.copy = [&log](void *to, const void *from, size_t) { log.touch(std::vector<const void *>{to, from}); };
    }
    Request start(const std::function<void()> &f) override { return under_way(f); }

  protected:
    void do_all_reduce_sum(Slice data) override { touch({data}); }
    void do_reduce_scatter_sum(Slice send, Slice recv) override { touch({send, recv}); }
    void do_all_gather(Slice send, Slice recv) override { touch({send, recv}); }
    void do_all_to_all(Slice send, Slice recv) override { touch({send, recv}); }
    void do_broadcast(Slice data, int) override { touch({data}); }
    Request do_exchange(Slice send, int, Slice recv, int) override {
        return under_way([&] { touch({send, recv}); });
    }
    void do_wait(uint64_t id) override { log_.touch(waiting_.extract(id).mapped()); }
    void withdraw(uint64_t id) noexcept override { waiting_.erase(id); }
    std::unique_ptr<Comm> do_split(int, int) override {
        const int n = splits_.front();
        splits_.erase(splits_.begin());
        return std::make_unique<RehearsalComm>(log_, rank % n, n);
    }
    void gather_host(const void *own, size_t bytes, void *all) override {  // all ranks say the same
        for (int r = 0; r < size; r++) memcpy(static_cast<char *>(all) + size_t(r) * bytes, own, bytes);
    }

  private:
    Request under_way(const std::function<void()> &f) {
        waiting_[now_ = ++last_] = {};
        f();
        return {this, std::exchange(now_, 0)};
    }
    void touch(const std::vector<Slice> &slices) {
        std::vector<const void *> addresses;
        for (const Slice &s : slices)
            if (s.count && size > 1) addresses.push_back(s.data);
        log_.touch(addresses);
        if (now_) waiting_[now_].insert(waiting_[now_].end(), addresses.begin(), addresses.end());
    }

    Touches &log_;
    std::vector<int> splits_;
    std::map<uint64_t, std::vector<const void *>> waiting_;  // the arrays of calls under way
    uint64_t last_ = 0, now_ = 0;
};
