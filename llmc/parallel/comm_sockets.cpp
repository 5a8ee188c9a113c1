#include "comm_sockets.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <list>
#include <map>

#include "processes.h"

using Clock = std::chrono::steady_clock;
static constexpr std::chrono::seconds patience(5);  // how long to wait for a process that does not take a few bytes

namespace {

// ---- watchdogs ------------------------------------------------------------------------------------------------------------------------

// If a connection closes without a message, the process at its other end has died, which the lowest remaining rank reports. So a process
// that ends in any other way sends a message to all others first.
class SocketLine final : public Line {
  public:
    SocketLine(int rank, const std::vector<Socket> &peers) : rank_(rank), peers_(peers), there_(peers.size()) {
        for (size_t r = 0; r < peers.size(); r++) there_[r] = bool(peers[r]);
    }

    // Ends the run together with all ranks. No connection is closed before all ranks know that the run has ended.
    ~SocketLine() override {
        for (int r = 0; r < int(peers_.size()); r++) send(bye, r, "");
        Word word;
        for (int r = 0; r < int(peers_.size()); r++)
            while (there_[size_t(r)] && read(r, word) && word.kind != bye) {}
    }

    void send(int kind, int to, const std::string &text) override {
        const Header header{kind, int(text.size())};
        std::string frame(reinterpret_cast<const char *>(&header), sizeof(header));
        frame += text;
        if (peers_[size_t(to)]) peers_[size_t(to)].send_all(frame.data(), frame.size(), Clock::now() + patience);
    }

    bool receive(Word &word) override {
        std::vector<pollfd> fds;
        for (size_t r = 0; r < peers_.size(); r++) fds.push_back({there_[r] ? peers_[r].fd() : -1, POLLIN, 0});
        poll(fds.data(), fds.size(), 0);
        for (int r = 0; r < int(peers_.size()); r++) {
            if (!fds[size_t(r)].revents) continue;
            if (!read(r, word)) lost(r);
            else if (word.kind == end) end_everywhere("");
            else if (word.kind == bye) there_[size_t(r)] = false;
            else return true;
        }
        return false;
    }

    [[noreturn]] void end_everywhere(const std::string &message) override {
        ending_.lock();  // is never unlocked: if two threads come here, one ends the process
        say_last(message);
        for (int r = 0; r < int(peers_.size()); r++) send(end, r, "");
        std::_Exit(1);
    }

  private:
    enum { end = tell + 1, bye };  // end: the run fails; bye: this rank has reached the run's end
    struct Header {
        int kind, length;
    };

    bool read(int from, Word &word) {
        Header header;
        const Socket &s = peers_[size_t(from)];
        const auto deadline = Clock::now() + patience;
        if (!s.receive_all(&header, sizeof(header), deadline)) return false;
        word = {header.kind, from, std::string(size_t(header.length), '\0')};
        return s.receive_all(word.text.data(), word.text.size(), deadline);
    }

    void lost(int rank) {
        there_[size_t(rank)] = false;
        if (std::find(there_.begin(), there_.begin() + rank_, true) == there_.begin() + rank_)
            end_everywhere(format(
                "rank %d is gone: its process was killed or crashed, or its connection broke\n  fix: see what it said, and "
                "what the system's log says on its machine",
                rank));
    }

    const int rank_;
    const std::vector<Socket> &peers_;
    std::vector<bool> there_;  // used by the watchdog's thread alone
    std::mutex ending_;
};

// ---- messages -------------------------------------------------------------------------------------------------------------------------

// Moves messages in wait(), in both directions at once, and in post() as far as possible without waiting. The bytes of a rank stay in its
// socket until a receive from that rank is waited for. A message of another tag that precedes the one waited for is kept in memory.
class SocketsTransport final : public Transport {
  public:
    SocketsTransport(Watchdog &watchdog, int rank, const std::vector<Socket> &sockets)
        : watchdog_(watchdog), rank_(rank), peers_(sockets.size()) {
        for (size_t r = 0; r < sockets.size(); r++) peers_[r].fd = sockets[r].fd();
    }

    uint64_t post(int tag, const void *send, size_t send_bytes, int to, void *recv, size_t recv_bytes, int from,
                  const SliceMemory &) override {
        halves_[++last_id_] = (send_bytes != 0) + (recv_bytes != 0);
        if (recv_bytes) {
            Peer &peer = peers_[size_t(from)];
            peer.receives.push_back({last_id_, tag, static_cast<std::byte *>(recv), recv_bytes});
            if (auto &kept = peer.kept[tag]; !kept.empty()) {
                deliver(peer, std::prev(peer.receives.end()), kept.front());
                kept.pop_front();
            }
        }
        const auto data = static_cast<const std::byte *>(send);
        if (send_bytes && to == rank_) {
            message_has_come(peers_[size_t(to)], tag, {data, data + send_bytes});
            halves_.at(last_id_)--;
        } else if (send_bytes) {
            Peer &peer = peers_[size_t(to)];
            peer.sends.push_back({last_id_, {tag, send_bytes}, data, 0});
            if (peer.sends.size() == 1) write(peer);
        }
        return last_id_;
    }

    void wait(uint64_t id) override {
        const int &halves = halves_.at(id);
        if (halves) {
            watchdog_.waits(true);
            while (halves) move_something();
            watchdog_.waits(false);
        }
        halves_.erase(id);
    }

    // If the run goes on, no message of such a request is half moved: all ranks have agreed on the error, in messages that came after it over
    // the same connections, which keep the order. Any other error ends the run.
    void withdraw(uint64_t id) noexcept override {
        const auto is_its = [&](const auto &half) { return half.id == id; };
        for (Peer &peer : peers_) std::erase_if(peer.sends, is_its), std::erase_if(peer.receives, is_its);
        halves_.erase(id);
    }

    void enter(const Stamp &stamp) override { watchdog_.enter(stamp); }

  private:
    struct Header {
        int64_t tag;
        uint64_t bytes;
    };
    struct Send {
        uint64_t id;
        Header header;
        const std::byte *data;
        size_t done;  // bytes moved, of which the header's come first
    };
    struct Receive {
        uint64_t id;
        int64_t tag;
        std::byte *data;
        size_t bytes;
    };
    struct Peer {
        int fd = -1;
        bool closed = false;  // the watchdogs will end the run
        std::list<Send> sends;
        std::list<Receive> receives;                                 // in the order in which they were posted
        std::map<int64_t, std::deque<std::vector<std::byte>>> kept;  // by tag: messages that came before their receive was posted
        // The message that is arriving: its header, the number of bytes so far (the header's come first), and where the others go.
        Header header = {};
        size_t got = 0;
        std::byte *into = nullptr;
        bool in_place = false;  // to the first receive of its tag, else to the buffer
        std::vector<std::byte> buffer;
    };
    using ReceiveIterator = std::list<Receive>::iterator;

    // Sleeps until some posted message can move, and moves it.
    void move_something() {
        std::vector<pollfd> fds;
        for (const Peer &p : peers_) {
            const int events = (p.receives.empty() ? 0 : POLLIN) | (p.sends.empty() ? 0 : POLLOUT);
            fds.push_back({events && !p.closed ? p.fd : -1, short(events), 0});
        }
        poll(fds.data(), fds.size(), -1);  // without a limit: the watchdog ends a wait that takes too long
        for (size_t r = 0; r < peers_.size(); r++) {
            if (fds[r].revents & ~POLLIN) write(peers_[r]);
            if (fds[r].revents & ~POLLOUT) read(peers_[r]);
        }
    }

    void write(Peer &peer) {
        while (!peer.sends.empty()) {
            Send &s = peer.sends.front();
            const size_t head = sizeof(Header) - std::min(sizeof(Header), s.done), body = s.done + head - sizeof(Header);
            iovec rest[] = {{reinterpret_cast<std::byte *>(&s.header + 1) - head, head},
                            {const_cast<std::byte *>(s.data) + body, s.header.bytes - body}};
            msghdr message = {};
            message.msg_iov = rest, message.msg_iovlen = 2;
            const ssize_t n = sendmsg(peer.fd, &message, MSG_NOSIGNAL);
            if (n < 0) {
                peer.closed = !can_go_on();
                return;
            }
            s.done += size_t(n);
            if (s.done < sizeof(Header) + s.header.bytes) continue;
            halves_.at(s.id)--;
            peer.sends.pop_front();
        }
    }

    // Reads at most one message, as far as it has arrived.
    void read(Peer &peer) {
        do {
            const bool head = peer.got < sizeof(Header);
            std::byte *const begin = head ? reinterpret_cast<std::byte *>(&peer.header) : peer.into;
            const size_t done = head ? peer.got : peer.got - sizeof(Header), all = head ? sizeof(Header) : peer.header.bytes;
            const ssize_t n = recv(peer.fd, begin + done, all - done, 0);
            if (n <= 0) {
                peer.closed = n == 0 || !can_go_on();
                return;
            }
            peer.got += size_t(n);
            if (peer.got == sizeof(Header)) header_has_come(peer);
        } while (peer.got < sizeof(Header) + peer.header.bytes);
        if (peer.in_place) received(peer, receive_of(peer, peer.header.tag));
        else message_has_come(peer, peer.header.tag, std::move(peer.buffer));
        peer.got = 0, peer.buffer = {};
    }

    void header_has_come(Peer &peer) {
        const ReceiveIterator r = receive_of(peer, peer.header.tag);
        peer.in_place = r != peer.receives.end();
        if (peer.in_place) require_size(peer, *r, peer.header.bytes);
        else peer.buffer.resize(peer.header.bytes);
        peer.into = peer.in_place ? r->data : peer.buffer.data();
    }

    void message_has_come(Peer &peer, int64_t tag, std::vector<std::byte> message) {
        const ReceiveIterator r = receive_of(peer, tag);  // it may have been posted since the header came
        if (r != peer.receives.end()) deliver(peer, r, message);
        else peer.kept[tag].push_back(std::move(message));
    }

    void deliver(Peer &peer, ReceiveIterator to, const std::vector<std::byte> &message) {
        require_size(peer, *to, message.size());
        memcpy(to->data, message.data(), message.size());
        received(peer, to);
    }

    void received(Peer &peer, ReceiveIterator r) {
        halves_.at(r->id)--;
        peer.receives.erase(r);
    }

    void require_size(const Peer &peer, const Receive &r, size_t bytes) {
        if (bytes != r.bytes) die("rank %d sent %zu bytes where %zu were expected", int(&peer - peers_.data()), bytes, r.bytes);
    }

    static ReceiveIterator receive_of(Peer &peer, int64_t tag) {
        return std::find_if(peer.receives.begin(), peer.receives.end(), [&](const Receive &r) { return r.tag == tag; });
    }

    Watchdog &watchdog_;
    const int rank_;
    std::vector<Peer> peers_;  // by rank; messages of this rank to itself are only kept or delivered
    uint64_t last_id_ = 0;
    std::map<uint64_t, int> halves_;  // for each request the number of halves under way
};

}  // namespace

int run_sockets(const Rendezvous &rendezvous, const CommOptions &options, const std::function<int(Comm &)> &f) {
    const Connections connections = connect_all(rendezvous, options.timeout);
    SocketLine line(rendezvous.rank, connections.control);
    Watchdog watchdog(line, rendezvous.rank, rendezvous.world, options.timeout);
    SocketsTransport transport(watchdog, rendezvous.rank, connections.data);
    return run_process(transport, line, rendezvous.rank, rendezvous.world, options, f);
}
