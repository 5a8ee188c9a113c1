// A communicator that passes its calls to another one: the base class of wrappers that change some calls.
#pragma once
#include "../llmc/parallel/comm.h"

class WrappedComm : public Comm {
  public:
    explicit WrappedComm(Comm &comm) : Comm(comm.rank, comm.size), comm_(comm) { memory = comm.memory; }

  protected:
    void do_all_reduce_sum(Slice data) override { comm_.all_reduce_sum(data); }
    void do_reduce_scatter_sum(Slice send, Slice recv) override { comm_.reduce_scatter_sum(send, recv); }
    void do_all_gather(Slice send, Slice recv) override { comm_.all_gather(send, recv); }
    void do_all_to_all(Slice send, Slice recv) override { comm_.all_to_all(send, recv); }
    void do_exchange_all(const std::vector<Slice> &send, const std::vector<Slice> &recv) override {
        comm_.exchange_all(send, recv);
    }
    void do_broadcast(Slice data, int root) override { comm_.broadcast(data, root); }
    Request do_exchange(Slice, int, Slice, int) override { die("not needed here"); }
    void do_wait(uint64_t) override {}
    void withdraw(uint64_t) noexcept override {}
    std::unique_ptr<Comm> do_split(int color, int key) override { return comm_.split(color, key); }
    void gather_host(const void *own, size_t bytes, void *all) override {
        const std::string text(static_cast<const char *>(own), bytes);
        for (const std::string &t : comm_.gather(text)) memcpy(all, t.data(), bytes), all = static_cast<char *>(all) + bytes;
    }

  private:
    Comm &comm_;
};
