#include "comm_sockets.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "point_to_point.h"
#include "processes.h"

using Clock = std::chrono::steady_clock;
static constexpr std::chrono::milliseconds watch_period(100);
static constexpr std::chrono::seconds patience(5);        // wait for a process that does not accept a few bytes
static constexpr size_t longest_text = size_t(64) << 20;  // bytes that one rank may contribute to an agreement

namespace {

// Every message begins with a frame, and `bytes` bytes follow.
struct Frame {
    enum Kind : uint32_t {
        gather,  // to rank 0: this rank's contribution to an agreement; from rank 0: all contributions, in the order of ranks
        fail,    // to rank 0: this rank's process ends with an error, which must end the run
        bye,     // to rank 0: this rank has reached the end of the run
        end      // from rank 0: the run fails
    } kind;
    // The communicator: its tag and its first rank's number in the run, its size, and this rank's place in it.
    int32_t tag, first, size, place;
    uint64_t bytes;
    Stamp stamp;  // the call that it is for
};

// A thread of rank 0 that collects the ranks' contributions to an agreement and sends all of them to each rank. It ends the run if a rank waits too
// long or a rank's process dies.
class Switchboard {
  public:
    // sockets[r] is the connection to rank r, rank 0 included.
    Switchboard(std::vector<Socket> sockets, double timeout) : timeout_(timeout), peers_(sockets.size()) {
        for (size_t r = 0; r < sockets.size(); r++) peers_[r].socket = std::move(sockets[r]);
        thread_ = std::thread([this] { serve(); });
    }
    ~Switchboard() { thread_.join(); }  // joins when all ranks have reached the end of the run

  private:
    struct Peer {
        Socket socket;
        Frame frame;  // the arriving message
        std::string text;
        size_t got = 0;  // bytes of the message that have arrived
        Stamp last;      // its last agreement
        bool waits = false, over = false;
    };
    struct Agreement {
        Stamp stamp;
        uint64_t bytes;
        std::vector<int> ranks;  // [place]: the rank, once its contribution has arrived, or -1
        std::string all;
        Clock::time_point since;  // arrival of the first contribution
    };

    void serve() {
        while (std::ranges::any_of(peers_, [](const Peer &p) { return !p.over; })) {
            std::vector<pollfd> fds;
            for (const Peer &p : peers_) fds.push_back({p.over ? -1 : p.socket.fd(), POLLIN, 0});
            poll(fds.data(), fds.size(), int(watch_period.count()));
            for (size_t r = 0; r < peers_.size(); r++)
                if (fds[r].revents) read(int(r));
            for (const auto &[id, agreement] : agreements_)
                if (Clock::now() - agreement.since > std::chrono::duration<double>(timeout_)) hung(agreement);
        }
    }

    // Reads at most one message, as far as it has arrived.
    void read(int rank) {
        Peer &p = peers_[size_t(rank)];
        do {
            const bool head = p.got < sizeof(Frame);
            char *const to = head ? reinterpret_cast<char *>(&p.frame) + p.got : p.text.data() + p.got - sizeof(Frame);
            const size_t all = sizeof(Frame) + (head ? 0 : p.frame.bytes);
            const ssize_t n = recv(p.socket.fd(), to, all - p.got, 0);
            if (n < 0 && can_go_on()) return;
            if (n <= 0) lost(rank);
            p.got += size_t(n);
            if (p.got == sizeof(Frame)) {
                check(rank, p.frame);
                p.text.resize(p.frame.bytes);
            }
        } while (p.got < sizeof(Frame) + p.frame.bytes);
        p.got = 0;
        if (p.frame.kind == Frame::fail) end_all("");
        if (p.frame.kind == Frame::bye) p.over = true;
        else bring(rank, p);
    }

    // Rejects frames that no rank of this program sends, so no index leaves its array.
    void check(int rank, Frame &f) {
        f.stamp.call[sizeof(f.stamp.call) - 1] = f.stamp.file[sizeof(f.stamp.file) - 1] = 0;
        if (f.kind > Frame::bye || f.bytes > longest_text || f.size < 1 || size_t(f.size) > peers_.size() || f.place < 0 ||
            f.place >= f.size || f.stamp.type > SliceType::u8)
            end_all(format("rank %d has sent an unknown message\n  fix: run the same program on all machines", rank));
    }

    void bring(int rank, Peer &p) {
        const Frame &f = p.frame;
        Agreement &a = agreements_[{f.tag, f.first}];
        if (a.ranks.empty())
            a = {f.stamp, f.bytes, std::vector<int>(size_t(f.size), -1), std::string(f.bytes * uint64_t(f.size), '\0'),
                 Clock::now()};
        if (a.bytes != f.bytes || a.ranks.size() != size_t(f.size) || a.ranks[size_t(f.place)] >= 0)
            end_all(format("rank %d is at %s while another is at %s\n  fix: --debug compares the ranks' calls", rank,
                           f.stamp.text().c_str(), a.stamp.text().c_str()));
        a.ranks[size_t(f.place)] = rank;
        a.all.replace(size_t(f.place) * f.bytes, f.bytes, p.text);
        p.last = f.stamp, p.waits = true;
        if (std::ranges::count(a.ranks, -1)) return;
        Frame answer = f;
        answer.bytes = a.all.size();
        for (int r : a.ranks) {
            peers_[size_t(r)].waits = false;
            if (!send(r, answer, a.all, std::chrono::duration<double>(timeout_))) lost(r);
        }
        agreements_.erase({f.tag, f.first});
    }

    bool send(int rank, const Frame &frame, const std::string &text, std::chrono::duration<double> within) {
        std::string message(reinterpret_cast<const char *>(&frame), sizeof(frame));
        message += text;
        return peers_[size_t(rank)].socket.send_all(message.data(), message.size(),
                                                    Clock::now() + std::chrono::duration_cast<Clock::duration>(within));
    }

    [[noreturn]] void lost(int rank) {
        end_all(format(
            "rank %d is gone: its process was killed or crashed, or its connection broke\n  fix: see its last message, and the system log "
            "on its machine",
            rank));
    }

    [[noreturn]] void hung(const Agreement &a) {
        std::vector<std::string> states;
        for (const Peer &p : peers_) states.push_back(describe_rank(p.last, p.waits));
        end_all(hung_message(*std::ranges::find_if(a.ranks, [](int r) { return r >= 0; }), timeout_, states));
    }

    [[noreturn]] void end_all(const std::string &message) {
        say_last(message);
        Frame frame = {};
        frame.kind = Frame::end;
        for (size_t r = 1; r < peers_.size(); r++)  // this process exits after it has told all others
            if (!peers_[r].over) send(int(r), frame, "", patience);
        std::_Exit(1);
    }

    const double timeout_;
    std::vector<Peer> peers_;
    std::map<std::pair<int, int>, Agreement> agreements_;  // by tag and first rank
    std::thread thread_;
};

// A rank's connection to the switchboard. Its thread watches for the end of the run while this rank is not in a call.
class SwitchboardLine {
  public:
    explicit SwitchboardLine(const Socket &socket) : socket_(socket) {
        thread_ = std::thread([this] { watch(); });
    }
    ~SwitchboardLine() {
        {
            std::lock_guard lock(mutex_);
            stop_ = true;
        }
        wake_.notify_one();
        thread_.join();
        send(Frame::bye);
    }

    void gather(Frame frame, const void *own, size_t bytes, void *all) {
        if (bytes > longest_text)
            die("%s brings %zu bytes to an agreement; at most %zu are allowed", frame.stamp.text().c_str(), bytes, longest_text);
        std::lock_guard lock(mutex_);
        frame.kind = Frame::gather, frame.bytes = bytes;
        std::string message(reinterpret_cast<const char *>(&frame), sizeof(frame));
        message.append(static_cast<const char *>(own), bytes);
        Frame answer;
        const bool came = socket_.send_all(message.data(), message.size(), Clock::time_point::max()) &&
                          socket_.receive_all(&answer, sizeof(answer), Clock::time_point::max());
        if (!came || answer.kind != Frame::gather) failed(came);
        if (answer.bytes != bytes * size_t(frame.size))
            die("rank 0 answers %s by %zu bytes", frame.stamp.text().c_str(), size_t(answer.bytes));
        if (!socket_.receive_all(all, answer.bytes, Clock::time_point::max())) failed(false);
    }

    // Prints the message and ends this process, which ends the run on all ranks.
    [[noreturn]] void end_everywhere(const std::string &message) {
        say_last(message);
        std::lock_guard lock(mutex_);
        send(Frame::fail);
        char byte;
        const auto deadline = Clock::now() + patience;
        while (socket_.receive_all(&byte, 1, deadline)) {}  // until rank 0 closes the connection, after it has read the message
        std::_Exit(1);
    }

    int next_tag = 1;  // Comm::part_of

  private:
    void send(Frame::Kind kind) {
        Frame frame = {};
        frame.kind = kind, frame.size = 1;
        socket_.send_all(&frame, sizeof(frame), Clock::now() + patience);
    }

    void watch() {
        std::unique_lock lock(mutex_);
        while (!wake_.wait_for(lock, watch_period, [&] { return stop_; })) {
            char byte;
            const ssize_t n = recv(socket_.fd(), &byte, 1, MSG_PEEK);  // only the end of the run arrives outside a call
            if (n >= 0 || !can_go_on()) failed(n > 0);
        }
    }

    [[noreturn]] void failed(bool said) {
        say_last(
            said
                ? ""
                : "rank 0 is gone: its process was killed or crashed, or the connection to it broke\n  fix: see its last message");
        std::_Exit(1);
    }

    const Socket &socket_;
    std::mutex mutex_;  // is held during a call
    std::condition_variable wake_;
    bool stop_ = false;
    std::thread thread_;
};

class SocketsComm final : public Comm {
  public:
    // members[r]: rank r's number in the whole run.
    SocketsComm(SwitchboardLine &line, std::vector<int> members, int rank, int tag)
        : Comm(rank, int(members.size())), line_(line), members_(std::move(members)), tag_(tag) {}

  protected:
    void do_all_reduce_sum(Slice) override { refuse(); }
    void do_reduce_scatter_sum(Slice, Slice) override { refuse(); }
    void do_all_gather(Slice, Slice) override { refuse(); }
    void do_all_to_all(Slice, Slice) override { refuse(); }
    void do_broadcast(Slice, int) override { refuse(); }
    Request do_exchange(Slice, int, Slice, int) override { refuse(); }
    void do_wait(uint64_t) override { refuse(); }
    void withdraw(uint64_t) noexcept override {}
    std::unique_ptr<Comm> do_split(int color, int key) override {
        const Part part = part_of(color, key, line_.next_tag);
        std::vector<int> members;
        for (int r : part.ranks) members.push_back(members_[size_t(r)]);
        return std::make_unique<SocketsComm>(line_, members, part.rank, part.tag);
    }
    void gather_host(const void *own, size_t bytes, void *all) override {
        line_.gather({Frame::gather, tag_, members_[0], size, rank, bytes, now_}, own, bytes, all);
    }
    void enter(const Stamp &stamp) override { now_ = stamp; }

  private:
    [[noreturn]] void refuse() { die("%s: no slices go over sockets", now_.text().c_str()); }

    SwitchboardLine &line_;
    const std::vector<int> members_;
    const int tag_;
    Stamp now_;
};

}  // namespace

int run_sockets(const Rendezvous &rendezvous, const CommOptions &options, const std::function<int(Comm &)> &f) {
    std::vector<Socket> sockets = meet(rendezvous, options.timeout);
    std::optional<Switchboard> switchboard;
    Socket own;
    if (rendezvous.rank == 0) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends))
            die("no pair of sockets: %s", strerror(errno));
        own = Socket(ends[0]), sockets[0] = Socket(ends[1]);
        switchboard.emplace(std::move(sockets), options.timeout);
    } else {
        own = std::move(sockets[0]);
    }
    SwitchboardLine line(own);
    std::vector<int> members(static_cast<size_t>(rendezvous.world));
    std::iota(members.begin(), members.end(), 0);
    SocketsComm comm(line, members, int(rendezvous.rank), 0);
    comm.check = options.check;
    return run_process(comm, f, [&](const std::string &message) { line.end_everywhere(message); });
}
