// Ranks that are threads of one process. A message is a pointer into its sender's memory; the receiver copies from there, and the
// sender waits until it is done. A thread that waits sleeps on a condition variable.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <list>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <tuple>

#include "point_to_point.h"

using Clock = std::chrono::steady_clock;
static constexpr std::chrono::seconds grace(10);  // from a rank's failure to the end of the process, if other ranks do not end

namespace {

struct Message {
    const void *data;
    size_t bytes;
    bool taken = false, copied = false;  // the receiver sets these
};

// The state that all ranks share, guarded by `mutex`.
struct World {
    explicit World(int ranks, double timeout)
        : timeout(timeout), wake(size_t(ranks)), state(size_t(ranks)), waits(size_t(ranks)), ended(size_t(ranks)) {}

    const double timeout;
    std::mutex mutex;
    std::vector<std::condition_variable> wake;  // one for each rank
    std::condition_variable all_ended;
    std::map<std::tuple<int, int, int>, std::deque<std::shared_ptr<Message>>> boxes;  // by tag, sender, receiver
    std::vector<Stamp> state;                                                         // each rank's last call
    std::vector<bool> waits, ended;
    bool failed = false, agreed = false;
    std::string why;

    void fail(const std::string &reason, bool by_all = false) {
        if (failed) return;
        failed = true, agreed = by_all, why = reason;
        for (auto &w : wake) w.notify_one();
        all_ended.notify_one();
    }
};

struct Left : Error {  // thrown because another rank has failed
    using Error::Error;
};

class ThreadsTransport final : public Transport {
  public:
    ThreadsTransport(World &world, int rank) : world_(world), rank_(rank) {}

    uint64_t post(int tag, const void *send, size_t send_bytes, int to, void *recv, size_t recv_bytes, int from,
                  const SliceMemory &memory) override {
        Pending p{++last_id_, nullptr, {tag, rank_, to}, recv, recv_bytes, {tag, from, rank_}, &memory, recv_bytes == 0};
        if (send_bytes) {
            p.sent = std::make_shared<Message>(Message{send, send_bytes});
            std::lock_guard lock(world_.mutex);
            world_.boxes[p.to].push_back(p.sent);
            world_.wake[size_t(to)].notify_one();
        }
        pending_.push_back(std::move(p));
        return last_id_;
    }

    void wait(uint64_t id) override {
        const auto p = find(id);
        std::unique_lock lock(world_.mutex);
        const auto deadline = Clock::now() + std::chrono::duration<double>(world_.timeout);
        world_.waits[size_t(rank_)] = true;
        while (!p->done()) {
            if (world_.failed) throw Left(world_.why);
            if (receive_something(lock)) continue;
            const int other = p->received ? std::get<2>(p->to) : std::get<1>(p->from);
            if (world_.ended[size_t(other)])
                die("%s waits for rank %d, which has ended", world_.state[size_t(rank_)].text().c_str(), other);
            if (world_.wake[size_t(rank_)].wait_until(lock, deadline) == std::cv_status::timeout && !p->done() && !world_.failed)
                world_.fail(hung(), true);
        }
        world_.waits[size_t(rank_)] = false;
        pending_.erase(p);
    }

    void withdraw(uint64_t id) noexcept override {
        const auto p = find(id);
        std::unique_lock lock(world_.mutex);
        if (p->sent && !p->sent->taken) std::erase(world_.boxes[p->to], p->sent);
        else if (p->sent) world_.wake[size_t(rank_)].wait(lock, [&] { return p->sent->copied; });
        pending_.erase(p);
    }

    void enter(const Stamp &stamp) override {
        std::lock_guard lock(world_.mutex);
        world_.state[size_t(rank_)] = stamp;
    }

  private:
    using Box = std::tuple<int, int, int>;
    struct Pending {
        uint64_t id;
        std::shared_ptr<Message> sent;  // null if there was nothing to send
        Box to;
        void *recv;
        size_t recv_bytes;
        Box from;
        const SliceMemory *memory;
        bool received;
        bool done() const { return received && (!sent || sent->copied); }
    };

    std::list<Pending>::iterator find(uint64_t id) {
        return std::find_if(pending_.begin(), pending_.end(), [&](const Pending &p) { return p.id == id; });
    }

    // Copies the first message that has arrived for any of this rank's requests, in any order, because its sender may be waiting.
    bool receive_something(std::unique_lock<std::mutex> &lock) {
        std::vector<Box> waiting;  // requests of one box are served in order
        for (Pending &p : pending_) {
            if (p.received || std::find(waiting.begin(), waiting.end(), p.from) != waiting.end()) continue;
            auto &box = world_.boxes[p.from];
            if (box.empty()) {
                waiting.push_back(p.from);
                continue;
            }
            const std::shared_ptr<Message> message = box.front();
            box.pop_front();
            const int sender = std::get<1>(p.from);
            if (message->bytes != p.recv_bytes)
                die("rank %d sent %zu bytes to rank %d, which expected %zu in %s", sender, message->bytes, rank_, p.recv_bytes,
                    world_.state[size_t(rank_)].text().c_str());
            message->taken = true;
            lock.unlock();
            std::exception_ptr error;
            try {
                p.memory->copy(p.recv, message->data, message->bytes);
            } catch (...) {
                error = std::current_exception();  // thrown after the sender has been released
            }
            lock.lock();
            p.received = message->copied = true;
            world_.wake[size_t(sender)].notify_one();
            if (error) std::rethrow_exception(error);
            return true;
        }
        return false;
    }

    std::string hung() const {
        std::vector<std::string> ranks;
        for (size_t r = 0; r < world_.state.size(); r++)
            ranks.push_back(world_.ended[r] ? "has ended" : describe_rank(world_.state[r], world_.waits[r]));
        return hung_message(rank_, world_.timeout, ranks);
    }

    World &world_;
    const int rank_;
    uint64_t last_id_ = 0;
    std::list<Pending> pending_;  // in the order in which they were posted; only this rank's thread uses it
};

}  // namespace

static void run_rank(World &world, int rank, const CommOptions &options, const std::function<int(Comm &)> &f, int &result) {
    std::string failure;
    bool failed = true, agreed = false;
    try {
        ThreadsTransport transport(world, rank);
        std::vector<int> members(world.wake.size());
        std::iota(members.begin(), members.end(), 0);
        PointToPointComm comm(transport, members, rank, 0);
        comm.check = options.check;
        result = f(comm);
        failed = false;
    } catch (const AgreedError &error) {
        failure = error.what(), agreed = error.ranks == int(world.wake.size());
    } catch (const std::exception &error) {
        failure = format("rank %d: %s", rank, message_of(error).c_str());
    }
    std::lock_guard lock(world.mutex);
    if (failed) world.fail(failure, agreed);
    world.ended[size_t(rank)] = true;
    for (auto &w : world.wake) w.notify_one();
    world.all_ended.notify_one();
}

int run_threads(int ranks, const CommOptions &options, const std::function<int(Comm &)> &f) {
    World world(ranks, options.timeout);
    std::vector<int> results(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; r++) threads.emplace_back([&, r] { run_rank(world, r, options, f, results[size_t(r)]); });
    {
        std::unique_lock lock(world.mutex);
        const auto over = [&] { return std::count(world.ended.begin(), world.ended.end(), false) == 0; };
        world.all_ended.wait(lock, [&] { return over() || world.failed; });
        if (!world.all_ended.wait_for(lock, grace,
                                      over)) {  // a thread that is not in a call can only be stopped with the process
            fflush(stdout);
            fprintf(stderr, "%s\n", world.why.c_str());
            std::_Exit(1);
        }
    }
    for (std::thread &t : threads) t.join();
    if (world.agreed) throw AgreedError(world.why, ranks);
    if (world.failed) throw Error(world.why);
    return results[0];
}
