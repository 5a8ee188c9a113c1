#include "rendezvous.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <thread>

#include "../core/common.h"

using Clock = std::chrono::steady_clock;
using Time = Socket::Time;
static constexpr double longest_search = 60, longest_attempt = 5, longest_answer = 10;  // seconds
static constexpr std::chrono::milliseconds between_attempts(100);

static Time in_seconds(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// ---- sockets --------------------------------------------------------------------------------------------------------------------------

// Sleeps until one of the events (POLLIN, POLLOUT) comes, or an error, which the next call on it will tell.
static void sleep_until(std::vector<pollfd> fds, Time deadline) {
    const double left = std::chrono::duration<double, std::milli>(deadline - Clock::now()).count();
    poll(fds.data(), fds.size(), int(std::ceil(std::clamp(left, 0.0, 1e6))));
}

bool can_go_on() { return errno == EAGAIN || errno == EINTR; }

Socket::~Socket() {
    if (fd_ >= 0) close(fd_);
}

bool Socket::send_all(const void *data, size_t bytes, Time deadline) const {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = ::send(fd_, static_cast<const std::byte *>(data) + done, bytes - done, MSG_NOSIGNAL);
        if (n >= 0) done += size_t(n);
        else if (!can_go_on() || Clock::now() > deadline) return false;
        else sleep_until({{fd_, POLLOUT, 0}}, deadline);
    }
    return true;
}

bool Socket::receive_all(void *data, size_t bytes, Time deadline) const {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = recv(fd_, static_cast<std::byte *>(data) + done, bytes - done, 0);
        if (n > 0) done += size_t(n);
        else if (n == 0 || !can_go_on() || Clock::now() > deadline) return false;
        else sleep_until({{fd_, POLLIN, 0}}, deadline);
    }
    return true;
}

// ---- addresses ------------------------------------------------------------------------------------------------------------------------

namespace {

struct Address {
    std::string host, port;
    std::string text() const { return (host.find(':') == host.npos ? host : "[" + host + "]") + ":" + port; }
};

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

}  // namespace

static Address parse_address(const std::string &text) {
    const size_t colon = text.rfind(':');
    Address a;
    if (colon != text.npos) a = {text.substr(0, colon), text.substr(colon + 1)};
    const bool brackets = a.host.size() > 2 && a.host.front() == '[' && a.host.back() == ']';
    const bool number =
        a.port.size() <= 5 && std::all_of(a.port.begin(), a.port.end(), [](char c) { return c >= '0' && c <= '9'; });
    const int port = a.port.empty() || !number ? 0 : std::stoi(a.port);
    if (a.host.empty() || port < 1 || port > 65535 || (a.host.find(':') != a.host.npos && !brackets))
        die("--rendezvous \"%s\" is not HOST:PORT\n  fix: a name or an address of rank 0's machine, and a port that is free there, as in "
            "node1:29500, 10.0.0.1:29500 or [fd00::1]:29500",
            text.c_str());
    if (brackets) a.host = a.host.substr(1, a.host.size() - 2);
    return a;
}

static AddressList resolve(const Address &at) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int code = getaddrinfo(at.host.c_str(), at.port.c_str(), &hints, &found))
        die("there is no host \"%s\": %s\n  fix: --rendezvous with a name that this machine knows, or with an address",
            at.host.c_str(), code == EAI_SYSTEM ? strerror(errno) : gai_strerror(code));
    return {found, &freeaddrinfo};
}

// Returns the address of one end of a connection; the function, getsockname or getpeername, chooses the end.
static Address address_of(const Socket &socket, int (*end)(int, sockaddr *, socklen_t *)) {
    sockaddr_storage address = {};
    socklen_t length = sizeof(address);
    char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
    end(socket.fd(), reinterpret_cast<sockaddr *>(&address), &length);
    getnameinfo(reinterpret_cast<sockaddr *>(&address), length, host, sizeof(host), port, sizeof(port),
                NI_NUMERICHOST | NI_NUMERICSERV);
    return {host, port};
}

static void send_at_once(const Socket &socket) {  // small messages do not wait to become larger ones
    const int on = 1;
    setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// ---- listen, connect ------------------------------------------------------------------------------------------------------------------

static Socket new_socket(const addrinfo &a) { return Socket(socket(a.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

static Socket listen_at(const Address &at) {
    const AddressList addresses = resolve(at);
    int error = 0;
    for (const addrinfo *a = addresses.get(); a && error != EADDRINUSE; a = a->ai_next) {
        Socket s = new_socket(*a);
        const int on = 1;  // recently closed connections must not block the port
        if (s && setsockopt(s.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
            bind(s.fd(), a->ai_addr, a->ai_addrlen) == 0 && listen(s.fd(), SOMAXCONN) == 0)
            return s;
        error = errno;
    }
    die("cannot listen at %s: %s\n  fix: %s", at.text().c_str(), strerror(error),
        error == EADDRNOTAVAIL
            ? "--rendezvous with an address of the machine that rank 0 runs on"
            : "another port in --rendezvous, for all ranks; or end the program that has it, if it is another rank 0");
}

// Tries until the deadline. `error` is the errno of the last failure.
static Socket connect_to(const Address &at, Time deadline, int &error) {
    const AddressList addresses = resolve(at);
    for (;; std::this_thread::sleep_for(between_attempts)) {
        for (const addrinfo *a = addresses.get(); a; a = a->ai_next) {
            Socket s = new_socket(*a);
            error = s && connect(s.fd(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
            if (error == EINPROGRESS) {
                sleep_until({{s.fd(), POLLOUT, 0}}, std::min(deadline, in_seconds(longest_attempt)));
                sockaddr_storage peer;
                socklen_t length = sizeof(error), peer_length = sizeof(peer);
                getsockopt(s.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
                if (!error && getpeername(s.fd(), reinterpret_cast<sockaddr *>(&peer), &peer_length) != 0) error = ETIMEDOUT;
            }
            // If no process listens, a connection may connect to itself, when the system gives its own end the port that it calls.
            if (!error && address_of(s, getsockname).text() == address_of(s, getpeername).text()) error = ECONNREFUSED;
            if (error) continue;
            send_at_once(s);
            return s;
        }
        if (Clock::now() > deadline) return Socket();
    }
}

// ---- greetings ------------------------------------------------------------------------------------------------------------------------

namespace {

enum Role : uint32_t { control, data, welcome, taken };  // the last two: rank 0's answers

struct Greeting {  // the first message over a connection
    char magic[8];
    uint32_t version;
    int32_t rank, world;
    Role role;
    int32_t port;  // sent to rank 0: the port where this rank listens
};
static constexpr char magic[9] = "llmcrank";
static constexpr uint32_t version = 1;

struct ListenAddress {  // where a rank listens
    char host[64];
    int32_t port;
};

Greeting greeting(const Rendezvous &me, Role role, int port = 0) {
    Greeting g = {{}, version, me.rank, me.world, role, port};
    memcpy(g.magic, magic, sizeof(g.magic));
    return g;
}

bool is_closed(const Socket &s) {
    char byte;
    return recv(s.fd(), &byte, 1, MSG_PEEK) == 0;
}

// Accepts connections as long as `wanted` is true, and hands over those that begin with a rank's greeting. All others are closed.
void accept_ranks(const Socket &listener, Time deadline, const std::function<bool()> &wanted,
                  const std::function<void(Socket, const Greeting &)> &come) {
    struct Stranger {
        Socket socket;
        Greeting greeting = {};
        size_t got = 0;
    };
    std::list<Stranger> strangers;
    while (wanted() && Clock::now() < deadline) {
        std::vector<pollfd> fds = {{listener.fd(), POLLIN, 0}};
        for (const Stranger &s : strangers) fds.push_back({s.socket.fd(), POLLIN, 0});
        sleep_until(fds, deadline);
        if (Socket s(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)); s) {
            send_at_once(s);
            strangers.push_back({std::move(s)});
        } else if (!can_go_on() && errno != ECONNABORTED)
            die("cannot accept a connection: %s\n  fix: ulimit -n", strerror(errno));
        for (auto next = strangers.begin(); next != strangers.end();) {
            const auto s = next++;
            const ssize_t n = recv(s->socket.fd(), reinterpret_cast<char *>(&s->greeting) + s->got, sizeof(Greeting) - s->got, 0);
            if (n < 0 && can_go_on()) continue;
            if (n > 0) s->got += size_t(n);
            if (n > 0 && memcmp(s->greeting.magic, magic, std::min(s->got, sizeof(s->greeting.magic))) == 0) {
                if (s->got < sizeof(Greeting)) continue;
                come(std::move(s->socket), s->greeting);
            }
            strangers.erase(s);
        }
    }
}

bool fits(const Rendezvous &me, const Greeting &g) {
    return g.version == version && g.world == me.world && g.rank > me.rank && g.rank < me.world;
}

std::string missing(const Rendezvous &me, const std::vector<Socket> &ranks) {  // the missing ranks after this one, "2, 3"
    std::string text;
    for (int r = me.rank + 1; r < me.world; r++)
        if (!ranks[size_t(r)]) text += (text.empty() ? "" : ", ") + std::to_string(r);
    return text;
}

// Rank 0: waits for all others, and tells each where all of them listen.
void gather(const Rendezvous &me, const Socket &listener, double timeout, Connections &c) {
    std::vector<ListenAddress> addresses(static_cast<size_t>(me.world));
    const auto wanted = [&] {
        for (Socket &s : c.control)
            if (s && is_closed(s)) s = Socket();  // that process has ended, and was perhaps started again
        return !missing(me, c.control).empty();
    };
    accept_ranks(listener, in_seconds(timeout), wanted, [&](Socket s, const Greeting &g) {
        const bool good = fits(me, g), twice = good && c.control[size_t(g.rank)] && !is_closed(c.control[size_t(g.rank)]);
        const Greeting answer = greeting(me, twice ? taken : welcome);
        if (!s.send_all(&answer, sizeof(answer), in_seconds(longest_answer)) || !good || twice)
            return;  // the other rank sees the reason by itself
        ListenAddress &listens = addresses[size_t(g.rank)];
        snprintf(listens.host, sizeof(listens.host), "%s", address_of(s, getpeername).host.c_str());
        listens.port = g.port;
        c.control[size_t(g.rank)] = std::move(s);
    });
    if (wanted())
        die("of %d ranks these have not come to %s within %g s: %s\n  fix: start them, all with the same --rendezvous", me.world,
            me.address.c_str(), timeout, missing(me, c.control).c_str());
    for (int r = 1; r < me.world; r++)
        c.control[size_t(r)].send_all(addresses.data(), addresses.size() * sizeof(ListenAddress), in_seconds(longest_answer));
}

// Another rank: tells rank 0 where it listens itself, and learns where the others do.
std::vector<ListenAddress> join(const Rendezvous &me, const Address &address, double timeout, Connections &c, Socket &listener) {
    const double search = std::min(timeout, longest_search);
    const char *const at = me.address.c_str();
    int error = 0;
    Socket s = connect_to(address, in_seconds(search), error);
    if (!s)
        die("nobody answers at %s, where rank 0 should be, for %g s: %s\n  fix: start rank 0 there, with the same --rendezvous; if it runs, a "
            "firewall is in between",
            at, search, strerror(error));
    listener = listen_at({address_of(s, getsockname).host, "0"});

    Greeting mine = greeting(me, control, std::stoi(address_of(listener, getsockname).port)), answer = {};
    if (!s.send_all(&mine, sizeof(mine), in_seconds(longest_answer)) ||
        !s.receive_all(&answer, sizeof(answer), in_seconds(std::min(timeout, longest_answer))) ||
        memcmp(answer.magic, magic, sizeof(answer.magic)) != 0)
        die("something answers at %s, but not as rank 0 does\n  fix: another port in --rendezvous, for all ranks, if another program has this one",
            at);
    if (answer.version != version) die("rank 0 at %s is another version of this program\n  fix: the same on all machines", at);
    if (answer.world != me.world)
        die("rank %d has --world_size %d, but rank 0 at %s has %d\n  fix: the same --world_size for all ranks", me.rank, me.world,
            at, answer.world);
    if (answer.role == taken)
        die("another process is rank %d at %s already\n  fix: a --rank of its own for each process, from 0 to %d", me.rank, at,
            me.world - 1);

    std::vector<ListenAddress> addresses(static_cast<size_t>(me.world));
    if (!s.receive_all(addresses.data(), addresses.size() * sizeof(ListenAddress), in_seconds(timeout + longest_search)))
        die("rank 0 at %s has ended before all ranks had come\n  fix: see what it says", at);
    c.control[0] = std::move(s);
    return addresses;
}

Socket call(const Rendezvous &me, int rank, const Address &address, Role role, double seconds) {
    int error = 0;
    Socket s = connect_to(address, in_seconds(seconds), error);
    const Greeting mine = greeting(me, role);
    if (s && !s.send_all(&mine, sizeof(mine), in_seconds(seconds))) error = errno;
    if (error)
        die("rank %d does not reach rank %d at %s: %s\n  fix: in --rendezvous an address by which all machines reach each other, and all ports "
            "open between them",
            me.rank, rank, address.text().c_str(), strerror(error));
    return s;
}

}  // namespace

Connections connect_all(const Rendezvous &me, double timeout) {
    if (me.world < 1) die("--world_size %d\n  fix: the number of processes, at least 1", me.world);
    if (me.rank < 0 || me.rank >= me.world)
        die("--rank %d is not a rank of --world_size %d\n  fix: from 0 to %d", me.rank, me.world, me.world - 1);
    const Address address = parse_address(me.address);
    Connections c;
    c.data.resize(size_t(me.world)), c.control.resize(size_t(me.world));
    Socket listener;
    std::vector<ListenAddress> addresses;
    if (me.rank == 0) gather(me, listener = listen_at(address), timeout, c);
    else addresses = join(me, address, timeout, c, listener);

    const double seconds = std::min(timeout, longest_search);
    for (int r = 0; r < me.rank; r++) {
        const ListenAddress &p = addresses[size_t(r)];
        const Address there = r == 0 ? address : Address{p.host, std::to_string(p.port)};
        c.data[size_t(r)] = call(me, r, there, data, seconds);
        if (r > 0) c.control[size_t(r)] = call(me, r, there, control, seconds);
    }
    const auto wanted = [&] { return !missing(me, c.data).empty() || !missing(me, c.control).empty(); };
    accept_ranks(listener, in_seconds(seconds), wanted, [&](Socket s, const Greeting &g) {
        if (!fits(me, g)) return;
        Socket &connection = (g.role == data ? c.data : c.control)[size_t(g.rank)];
        if (!connection) connection = std::move(s);
    });
    if (wanted())
        die("these ranks have not connected to rank %d within %g s: %s\n  fix: see what they say", me.rank, seconds,
            missing(me, c.data).c_str());
    return c;
}
