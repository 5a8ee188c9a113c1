// Slices among emulator ranks that are processes. The emulator's NCCL only joins threads, so every slice is sent to all ranks as a text over the
// host's communicator. In these processes device memory is host memory, and stream work runs at once.
#pragma once
#include <deque>

#include "../../llmc/parallel/point_to_point.h"

class EmulatedProcesses final : public Comm {
  public:
    explicit EmulatedProcesses(Comm &host) : Comm(host.rank, host.size), host_(host) { check = host.check; }

  protected:
    void do_all_reduce_sum(Slice data) override { sum(all(data), 0, data); }
    void do_reduce_scatter_sum(Slice send, Slice recv) override { sum(all(send), size_t(rank) * recv.bytes(), recv); }
    void do_all_gather(Slice send, Slice recv) override { take(all(send), recv, 0); }
    void do_all_to_all(Slice send, Slice recv) override { take(all(send), recv, size_t(rank) * recv.bytes() / size_t(size)); }
    void do_broadcast(Slice data, int root) override { memcpy(data.data, all(data)[size_t(root)].data(), data.bytes()); }
    // An exchange only happens in its wait(), so ranks may begin it before or after calls of other communicators.
    Request do_exchange(Slice send, int, Slice recv, int from) override {
        exchanges_.push_back({++last_id_, send, recv, from});
        return {this, last_id_};
    }
    void do_wait(uint64_t id) override {
        for (; !exchanges_.empty() && exchanges_.front().id <= id; exchanges_.pop_front()) {
            const Exchange &e = exchanges_.front();
            const auto texts = all(e.send);
            if (e.recv.count) memcpy(e.recv.data, texts[size_t(e.from)].data(), e.recv.bytes());
        }
    }
    void withdraw(uint64_t id) noexcept override {
        std::erase_if(exchanges_, [&](const Exchange &e) { return e.id == id; });
    }
    std::unique_ptr<Comm> do_split(int color, int key) override {
        auto part = host_.split(color, key);
        auto out = std::make_unique<EmulatedProcesses>(*part);
        out->own_host_ = std::move(part);
        return out;
    }
    void gather_host(const void *own, size_t bytes, void *out) override {
        take(host_.gather(std::string(static_cast<const char *>(own), bytes)),
             Slice(static_cast<uint8_t *>(out), bytes * size_t(size)), 0);
    }

  private:
    std::vector<std::string> all(Slice s) { return host_.gather(std::string(static_cast<const char *>(s.data), s.bytes())); }

    static void sum(const std::vector<std::string> &texts, size_t offset, Slice out) {
        std::vector<const std::byte *> parts;
        for (const std::string &text : texts) parts.push_back(reinterpret_cast<const std::byte *>(text.data()) + offset);
        sum_slices(out.type, out.data, parts, out.count);
    }

    // out = the same part of each rank's text, in the order of ranks
    static void take(const std::vector<std::string> &texts, Slice out, size_t offset) {
        const size_t bytes = out.bytes() / texts.size();
        for (size_t r = 0; r < texts.size(); r++)
            memcpy(static_cast<std::byte *>(out.data) + r * bytes, texts[r].data() + offset, bytes);
    }

    struct Exchange {
        uint64_t id;
        Slice send, recv;
        int from;
    };
    std::deque<Exchange> exchanges_;  // exchanges that still need a wait
    uint64_t last_id_ = 0;
    Comm &host_;
    std::unique_ptr<Comm> own_host_;  // owns host_ if it was made for this communicator
};
