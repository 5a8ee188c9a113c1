// The communicator: all messages among ranks. Every task uses this interface, so the same program runs on one rank and on many.
//
// All ranks of a communicator make the same calls in the same order. Slices are arrays of the model, in host or device memory (`memory`); agreement
// is about single values on the host. Every sum adds the ranks' values in the order of ranks, so it has the same bits on every rank and in every run.
// Only NCCL chooses its own order (comm_nccl.h).
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#ifdef __cpp_consteval
#include <source_location>
#else
#include <experimental/source_location>
#endif
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/common.h"
#include "../core/dtype.h"

enum class SliceType : uint8_t { f32, f64, bf16, i32, i64, u8 };
template <class T> constexpr SliceType slice_type = SliceType(-1);
template <> inline constexpr SliceType slice_type<float> = SliceType::f32;
template <> inline constexpr SliceType slice_type<double> = SliceType::f64;
template <> inline constexpr SliceType slice_type<bf16> = SliceType::bf16;
template <> inline constexpr SliceType slice_type<int32_t> = SliceType::i32;
template <> inline constexpr SliceType slice_type<int64_t> = SliceType::i64;
template <> inline constexpr SliceType slice_type<uint8_t> = SliceType::u8;
size_t bytes_of(SliceType type);      // 4
const char *name_of(SliceType type);  // "f32"

struct Slice {
    void *data = nullptr;
    size_t count = 0;  // elements, not bytes
    SliceType type = SliceType::u8;

    Slice() = default;  // empty: nothing to send, nothing to receive
    template <class T>
    Slice(T *data, size_t count)  // a slice of const T may only be sent
        : data(const_cast<std::remove_const_t<T> *>(data)), count(count), type(slice_type<std::remove_const_t<T>>) {
        static_assert(slice_type<std::remove_const_t<T>> != SliceType(-1), "float, double, bf16, int32_t, int64_t or uint8_t");
    }
    size_t bytes() const { return count * bytes_of(type); }
    Slice part(size_t first, size_t n) const;  // elements [first, first + n)
};

// The memory of slices, by default the host's. On a GPU `finish` waits for the stream, and `copy` copies on it.
struct SliceMemory {
    std::function<void()> finish = [] {};  // returns when all work queued so far is done
    std::function<void(void *to, const void *from, size_t bytes)> copy = [](void *to, const void *from, size_t bytes) {
        if (bytes) memcpy(to, from, bytes);
    };  // `from` and `to` are in this memory or the host's. The copy is done on return, or (comm_nccl.h) in the stream's order
};

struct Comm;
#ifdef __cpp_consteval
using Where = std::source_location;
#else  // clang before 15, which tidy and the fuzzers may use
using Where = std::experimental::source_location;
#endif

// An exchange in flight; wait() ends it. If an exception destroys a request, the request is withdrawn, so no rank reads freed memory.
class [[nodiscard]] Request {
  public:
    Request() = default;  // nothing in flight
    Request(Comm *comm, uint64_t id) : comm(comm), id(id) {}
    Request(Request &&other) noexcept : comm(std::exchange(other.comm, nullptr)), id(other.id) {}
    Request &operator=(Request &&other) noexcept {
        std::swap(comm, other.comm), std::swap(id, other.id);
        return *this;
    }
    ~Request();

  private:
    friend struct Comm;
    Comm *comm = nullptr;
    uint64_t id = 0;
};

// Describes a rank's current call and the source line that makes it.
struct Stamp {
    char call[24] = "", file[72] = "";
    uint32_t line = 0;
    SliceType type = SliceType::u8;
    uint64_t count = 0, received = 0;  // `received` and `from` belong to an exchange
    int32_t to = -1, from = -1;        // `to` is the root of a broadcast

    bool operator==(const Stamp &) const = default;
    std::string text() const;  // "all_gather(5 f32) llmc/parallel/zero.cpp:88"
};

// Thrown by all ranks of a communicator with the same text, so one rank can print it and all can exit cleanly.
struct AgreedError : Error {
    int ranks;  // the size of the communicator
    AgreedError(const std::string &text, int ranks) : Error(text), ranks(ranks) {}
};

struct Comm {
    const int rank, size;
    SliceMemory memory;  // set it before the first slice; split() passes it on
    bool check = false;  // --debug: compare every call among the ranks before it is made; split() passes it on
    double seconds = 0;  // time that this rank has spent in calls with slices, including waits

    Comm(int rank, int size) : rank(rank), size(size) {}
    Comm(const Comm &) = delete;
    virtual ~Comm() = default;

    // ---- slices. They may be empty. Sums of bf16 are computed in float and rounded once.

    // data[i] = sum over ranks r of r's data[i]
    void all_reduce_sum(Slice data, Where at = Where::current());

    // recv[i] = sum over ranks r of r's send[rank * recv.count + i]; send.count = size * recv.count. recv may alias that
    // part of send.
    void reduce_scatter_sum(Slice send, Slice recv, Where at = Where::current());

    // recv[r * send.count + i] = r's send[i]; recv.count = size * send.count. send may alias its part of recv.
    void all_gather(Slice send, Slice recv, Where at = Where::current());

    // With n = send.count / size = recv.count / size: recv[r * n + i] = r's send[rank * n + i]. The two slices do not overlap.
    void all_to_all(Slice send, Slice recv, Where at = Where::current());

    // The same with n slices of any lengths for each rank: recv[r * n + i] = r's send[rank * n + i], for i < n.
    void exchange_all(const std::vector<Slice> &send, const std::vector<Slice> &recv, Where at = Where::current());

    // data[i] = root's data[i]
    void broadcast(Slice data, int root, Where at = Where::current());

    // Sends to one rank while receiving from another. There is no send or receive alone, so no order of calls can deadlock. Every rank calls it. An
    // empty slice ({}) skips a half, which must then also be empty on the other rank. Before wait(), `send` must not change and `recv` must not be
    // read. Several exchanges may be in flight, with other calls between them, and may be waited for in any order.
    Request exchange(Slice send, int to, Slice recv, int from, Where at = Where::current());
    void wait(Request request, Where at = Where::current());

    // Starts the collectives that f calls. Their slices must not be touched before wait(). On GPUs they overlap with computation; elsewhere they
    // are complete when start() returns.
    virtual Request start(const std::function<void()> &f) { return f(), Request(); }
    void start(Request &request,
               const std::function<void()> &f) {  // request = start(f); nvcc reports that form as a discarded [[nodiscard]] value
        Request started = start(f);
        std::swap(request, started);
    }

    // ---- communicators and agreement, on the host

    // Returns a communicator of the ranks of one color, in the order of key and then of rank. It must not outlive this one's run.
    std::unique_ptr<Comm> split(int color, int key, Where at = Where::current());

    void barrier(Where at = Where::current());  // returns when all ranks have called it
    double sum(double value, Where at = Where::current());
    int64_t sum(int64_t value, Where at = Where::current());
    // Sums elementwise. Every rank passes the same number of values.
    std::vector<double> sum(const std::vector<double> &values, Where at = Where::current());
    std::vector<int64_t> sum(const std::vector<int64_t> &values, Where at = Where::current());
    double max(double value, Where at = Where::current());
    bool all(bool value, Where at = Where::current());
    // Returns [r] = rank r's text, which should be short.
    std::vector<std::string> gather(const std::string &text, Where at = Where::current());
    template <class T> std::vector<T> gather(const T &value, Where at = Where::current()) {  // [r] = rank r's value
        static_assert(std::is_trivially_copyable_v<T>);
        std::vector<T> all(static_cast<size_t>(size));
        gather_bytes("gather", &value, sizeof(T), all.data(), at);
        return all;
    }

  protected:
    friend class Request;
    friend class NcclComm;  // uses another communicator's gather_host for agreement
    // The implementations of the calls above, which have already checked the arguments.
    virtual void do_all_reduce_sum(Slice data) = 0;
    virtual void do_reduce_scatter_sum(Slice send, Slice recv) = 0;
    virtual void do_all_gather(Slice send, Slice recv) = 0;
    virtual void do_all_to_all(Slice send, Slice recv) = 0;
    virtual void do_broadcast(Slice data, int root) = 0;
    virtual Request do_exchange(Slice send, int to, Slice recv, int from) = 0;
    virtual void do_exchange_all(const std::vector<Slice> &send, const std::vector<Slice> &recv);  // in terms of do_exchange
    virtual void do_wait(uint64_t id) = 0;
    // Cancels a request that nobody will wait for, because its slices are about to be freed.
    virtual void withdraw(uint64_t id) noexcept = 0;
    virtual std::unique_ptr<Comm> do_split(int color, int key) = 0;
    // all[r] = rank r's `bytes` bytes, on the host, in one round of messages. All agreement is built on this call.
    virtual void gather_host(const void *own, size_t bytes, void *all) = 0;
    virtual void enter(const Stamp &) {}  // tells a watchdog what this rank is doing
    void complete(Request &request);      // calls do_wait if the request is in flight

    // The part of a split to which this rank belongs: its ranks, numbered as in this communicator and in the order of the new one, and a tag that
    // none of them has used. A rank's tags increase, beginning at next_tag.
    struct Part {
        std::vector<int> ranks;
        int rank, tag;
    };
    Part part_of(int color, int key, int &next_tag);

  private:
    void stamp(Stamp stamp, const Where &at);
    void gather_bytes(const char *call, const void *own, size_t bytes, void *all, const Where &at);
    template <class T> std::vector<T> summed(const char *call, const std::vector<T> &values, const Where &at);
    template <class T> std::vector<T> gathered(const char *call, T value, const Where &at);
};

// Runs f on every rank; f must not call comm. If f throws on some ranks, all ranks throw an AgreedError with each distinct message once; or Stopped, if
// one of them has thrown it (../core/signals.h).
void agree(Comm &comm, const std::function<void()> &f, Where at = Where::current());

struct CommOptions {
    bool check = false;    // turns on Comm::check for all calls; --debug does so after the ranks have compared their flags
    double timeout = 600;  // --comm_timeout: seconds that a rank may wait for the others
};

// Runs f on `ranks` ranks, which are threads of this process, and returns rank 0's result. If a rank throws, all other ranks leave their calls, and
// run_threads throws the error ("rank 2: ..."). If a rank waits too long, the error lists the current call of every rank.
int run_threads(int ranks, const CommOptions &options, const std::function<int(Comm &)> &f);

struct SelfComm final : Comm {  // the communicator of a single rank
    SelfComm() : Comm(0, 1) {}

  protected:
    void do_all_reduce_sum(Slice) override {}
    void do_reduce_scatter_sum(Slice send, Slice recv) override { copy(send, recv); }
    void do_all_gather(Slice send, Slice recv) override { copy(send, recv); }
    void do_all_to_all(Slice send, Slice recv) override { copy(send, recv); }
    void do_broadcast(Slice, int) override {}
    Request do_exchange(Slice send, int, Slice recv, int) override { return copy(send, recv), Request(); }
    void do_wait(uint64_t) override {}
    void withdraw(uint64_t) noexcept override {}
    std::unique_ptr<Comm> do_split(int, int) override { return std::make_unique<SelfComm>(); }
    void gather_host(const void *own, size_t bytes, void *all) override { memcpy(all, own, bytes); }

  private:
    void copy(Slice send, Slice recv) {
        if (recv.data != send.data) memory.copy(recv.data, send.data, recv.bytes());
    }
};
