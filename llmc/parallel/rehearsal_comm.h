// A communicator that sends nothing, for a rehearsal (../core/rehearsal.h). It only touches slices when a call begins, and at its wait.
#pragma once
#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "../core/rehearsal.h"
#include "comm.h"

class RehearsalComm final : public Comm {
  public:
    struct Split {
        int size, distance;  // size of the new communicator; distance of its ranks in the world
    };
    // splits: the communicators of a mesh, in the order of its calls
    RehearsalComm(Touches &log, int rank, int size, std::vector<Split> splits = {}, int distance = 1)
        : Comm(rank, size), log_(log), splits_(std::move(splits)), distance_(distance) {
        memory.copy = [&log](void *to, const void *from, size_t) { log.touch(std::vector<const void *>{to, from}); };
    }
    Request start(const std::function<void()> &f) override { return under_way(f); }

  protected:
    void do_all_reduce_sum(Slice data) override { send(2 * data.bytes(), {data}); }
    void do_reduce_scatter_sum(Slice from, Slice to) override { send(from.bytes(), {from, to}); }
    void do_all_gather(Slice from, Slice to) override { send(to.bytes(), {from, to}); }
    void do_all_to_all(Slice from, Slice to) override { send(from.bytes(), {from, to}); }
    void do_broadcast(Slice data, int) override { send(data.bytes(), {data}); }
    Request do_exchange(Slice from, int, Slice to, int) override {
        return under_way([&] { send(from.bytes(), {from, to}); });
    }
    void do_wait(uint64_t id) override {
        const Message message = waiting_.extract(id).mapped();
        for (size_t transfer : message.transfers) log_.wait(transfer);
        log_.touch(message.arrays);
    }
    void withdraw(uint64_t id) noexcept override { waiting_.erase(id); }
    std::unique_ptr<Comm> do_split(int, int) override {
        const auto [n, distance] = splits_.front();
        splits_.erase(splits_.begin());
        return std::make_unique<RehearsalComm>(log_, rank / distance % n, n, std::vector<Split>(), distance);
    }
    void gather_host(const void *own, size_t bytes, void *all) override {  // all ranks contribute the same bytes
        for (int r = 0; r < size; r++) memcpy(static_cast<char *>(all) + size_t(r) * bytes, own, bytes);
    }

  private:
    struct Message {
        std::vector<size_t> transfers;
        std::vector<const void *> arrays;
    };
    Request under_way(const std::function<void()> &f) {
        waiting_[now_ = ++last_] = {};
        f();
        return {this, std::exchange(now_, 0)};
    }
    // Adds `bytes` for each rank but one to the bytes sent by all ranks. A rank alone only copies.
    void send(size_t bytes, const std::vector<Slice> &slices) {
        if (size == 1 && slices.front().data == slices.back().data) return;
        Message message;
        if (size > 1) message.transfers = {log_.start_message(size_t(size - 1) * bytes, size_t(size), size_t(distance_))};
        for (const Slice &s : slices)
            if (s.count) message.arrays.push_back(s.data);
        log_.touch(message.arrays);
        if (now_ == 0) return std::ranges::for_each(message.transfers, [&](size_t transfer) { log_.wait(transfer); }), void();
        Message &all = waiting_[now_];
        all.transfers.insert(all.transfers.end(), message.transfers.begin(), message.transfers.end());
        all.arrays.insert(all.arrays.end(), message.arrays.begin(), message.arrays.end());
    }

    Touches &log_;
    std::vector<Split> splits_;
    const int distance_;
    std::map<uint64_t, Message> waiting_;  // calls in flight
    uint64_t last_ = 0, now_ = 0;
};
