// All calls of a communicator, made of one: a rank sends bytes to one rank while it receives from another. What moves the bytes is
// the transport: between threads (comm_threads.cpp), between processes (comm_mpi.cpp, comm_sockets.cpp). The sums are made here, so
// they are the same.
#pragma once
#include "comm.h"

// One rank's connection to all ranks of the run. Between two ranks, messages of one tag arrive in the order in which they were sent.
class Transport {
  public:
    virtual ~Transport() = default;

    // Starts to send to `to` and to receive from `from` (of the whole run); a half of 0 bytes does not exist. The id is never 0.
    virtual uint64_t post(int tag, const void *send, size_t send_bytes, int to, void *recv, size_t recv_bytes, int from,
                          const SliceMemory &memory) = 0;
    virtual void wait(uint64_t id) = 0;  // both halves; throws if another rank has failed
    virtual void withdraw(uint64_t id) noexcept = 0;
    virtual void enter(const Stamp &stamp) = 0;  // what this rank does from now on, for the others to see if it hangs

    int next_tag = 1;  // larger than those of this rank's communicators
};

class PointToPointComm final : public Comm {
  public:
    // members[r]: rank r's number in the whole run.
    PointToPointComm(Transport &transport, std::vector<int> members, int rank, int tag)
        : Comm(rank, int(members.size())), transport_(transport), members_(std::move(members)), tag_(tag) {}

  protected:
    void do_all_reduce_sum(Slice data) override;
    void do_reduce_scatter_sum(Slice send, Slice recv) override;
    void do_all_gather(Slice send, Slice recv) override;
    void do_all_to_all(Slice send, Slice recv) override;
    void do_broadcast(Slice data, int root) override;
    Request do_exchange(Slice send, int to, Slice recv, int from) override;
    void do_wait(uint64_t id) override { transport_.wait(id); }
    void withdraw(uint64_t id) noexcept override { transport_.withdraw(id); }
    std::unique_ptr<Comm> do_split(int color, int key) override;
    void gather_host(const void *own, size_t bytes, void *all) override;
    void enter(const Stamp &stamp) override { transport_.enter(stamp); }

  private:
    Request start(Slice send, int to, Slice recv, int from, const SliceMemory &memory);
    void with_each(const std::function<Slice(size_t)> &send_to, const std::function<Slice(size_t)> &receive_from,
                   const SliceMemory &memory);
    void reduce_parts(Slice data, const std::vector<size_t> &begin, Slice out);

    Transport &transport_;
    std::vector<int> members_;
    int tag_;
};

// What a watchdog says: of one rank, and when the run ends.
std::string describe_rank(const Stamp &last, bool waits);
std::string hung_message(int rank, double timeout, const std::vector<std::string> &ranks);  // empty: no answer
