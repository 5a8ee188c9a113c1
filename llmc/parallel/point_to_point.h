// A communicator built on point-to-point messages: in each call a rank sends bytes to one rank while it receives from another. A transport moves the
// bytes, between threads (comm_threads.cpp) or processes (comm_mpi.cpp). Sums are computed here, so they do not depend on the transport.
#pragma once
#include "comm.h"

// Computes out (n) = the sum of parts[0], parts[1], ..., in that order; bf16 is summed in float. out may be one of the parts.
void sum_slices(SliceType type, void *out, const std::vector<const std::byte *> &parts, size_t n);

// One rank's connection to all ranks of the run. Between two ranks, messages of one tag arrive in the order in which they were sent.
class Transport {
  public:
    virtual ~Transport() = default;

    // Starts to send to rank `to` and to receive from rank `from`, numbered in the whole run. A half of 0 bytes is skipped. The id is never 0.
    virtual uint64_t post(int tag, const void *send, size_t send_bytes, int to, void *recv, size_t recv_bytes, int from,
                          const SliceMemory &memory) = 0;
    virtual void wait(uint64_t id) = 0;  // returns when both halves are done; throws if another rank has failed
    virtual void withdraw(uint64_t id) noexcept = 0;
    virtual void enter(const Stamp &stamp) = 0;  // records this rank's call, which other ranks report if it hangs

    int next_tag = 1;  // Comm::part_of
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
    Request post(Slice send, int to, Slice recv, int from, const SliceMemory &memory);
    void with_each(const std::function<Slice(size_t)> &send_to, const std::function<Slice(size_t)> &receive_from,
                   const SliceMemory &memory);
    void reduce_parts(Slice data, const std::vector<size_t> &begin, Slice out);

    Transport &transport_;
    std::vector<int> members_;
    int tag_;
};

// The watchdog's texts: the call of one rank, and the error that ends the run.
std::string describe_rank(const Stamp &last, bool waits);
// An empty entry of `ranks` stands for a rank that has not answered.
std::string hung_message(int rank, double timeout, const std::vector<std::string> &ranks);
