#include "rendezvous.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <thread>

#include "../core/common.h"
#include "../core/hmac.h"

using Clock = std::chrono::steady_clock;
using Time = Socket::Time;
static constexpr double longest_search = 60, longest_attempt = 5, longest_answer = 10, longest_proof = 5;  // seconds
static constexpr size_t most_strangers = 256, shortest_secret = 16;
static constexpr int most_ranks = 1 << 16;
static constexpr std::chrono::milliseconds between_attempts(100);

static Time in_seconds(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// ---- sockets --------------------------------------------------------------------------------------------------------------------------

// Sleeps until one of the events (POLLIN, POLLOUT) occurs, or an error, which the next call on the socket reports.
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
        else if (!can_go_on()) return false;
        if (done < bytes && Clock::now() > deadline) return false;
        if (n < 0) sleep_until({{fd_, POLLOUT, 0}}, deadline);
    }
    return true;
}

bool Socket::receive_all(void *data, size_t bytes, Time deadline) const {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = recv(fd_, static_cast<std::byte *>(data) + done, bytes - done, 0);
        if (n > 0) done += size_t(n);
        else if (n == 0 || !can_go_on()) return false;
        if (done < bytes && Clock::now() > deadline) return false;
        if (n < 0) sleep_until({{fd_, POLLIN, 0}}, deadline);
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
        die("--rendezvous \"%s\" is not HOST:PORT\n  fix: give a name or an address of rank 0's machine, and a free port there, such as "
            "node1:29500, 10.0.0.1:29500 or [fd00::1]:29500",
            text.c_str());
    if (brackets) a.host = a.host.substr(1, a.host.size() - 2);
    return a;
}

static AddressList resolve(const Address &at) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (const int code = getaddrinfo(at.host.c_str(), at.port.c_str(), &hints, &found))
        die("there is no host \"%s\": %s\n  fix: give --rendezvous a name that this machine knows, or an address",
            at.host.c_str(), code == EAI_SYSTEM ? strerror(errno) : gai_strerror(code));
    return {found, &freeaddrinfo};
}

// True for a loopback address, which no other machine can reach.
static bool is_loopback(const addrinfo &a) {
    if (a.ai_family == AF_INET) return ntohl(reinterpret_cast<const sockaddr_in *>(a.ai_addr)->sin_addr.s_addr) >> 24 == 127;
    return a.ai_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6 *>(a.ai_addr)->sin6_addr);
}

static std::string secret_for(const Address &at) {
    const char *given = getenv("LLMC_RENDEZVOUS_SECRET");
    const std::string secret = given ? given : "";
    const AddressList addresses = resolve(at);
    bool open = false;
    for (const addrinfo *a = addresses.get(); a; a = a->ai_next) open = open || !is_loopback(*a);
    if (secret.empty() ? open : secret.size() < shortest_secret)
        die("%s\n  fix: set the same LLMC_RENDEZVOUS_SECRET of at least %zu characters in the environment of all ranks, e.g. from `openssl rand -hex 16`",
            secret.empty() ? format("other machines reach %s, and no secret keeps them out", at.text().c_str()).c_str()
                           : "LLMC_RENDEZVOUS_SECRET is so short that it can be guessed",
            shortest_secret);
    return secret;
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

static void send_at_once(const Socket &socket) {  // disables Nagle's algorithm
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
            // If no process listens, a connection may connect to itself, if the system assigns its own end the same port.
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

// Rank 0 says hello, the other rank proves that it knows the secret, and rank 0's answer proves the same. A proof covers random bytes of both
// sides, so it cannot be replayed; the secret itself is never sent. All messages have a fixed size, and no padding.
using Nonce = std::array<uint8_t, 32>;
struct Hello {
    char magic[8];
    uint32_t version;
    Nonce nonce;
};
struct Application {
    int32_t rank, world;
    Nonce nonce;
    Digest proof;
};
enum Verdict : uint32_t { welcome, taken, unfit };
struct Answer {
    Verdict verdict;
    int32_t world;  // rank 0's world size
    Digest proof;
};
constexpr char magic[9] = "llmcrank";
constexpr uint32_t version = 2;

Nonce new_nonce() {
    Nonce nonce;
    if (getrandom(nonce.data(), nonce.size(), 0) != ssize_t(nonce.size())) die("no random bytes: %s", strerror(errno));
    return nonce;
}

Hello new_hello() {
    Hello h = {{}, version, new_nonce()};
    memcpy(h.magic, magic, sizeof(h.magic));
    return h;
}

std::string text_of(const Nonce &nonce) { return {nonce.begin(), nonce.end()}; }

Digest proof_of(const std::string &secret, const Hello &h, const Application &a) {
    return hmac_sha256(secret, format("rank %d of %d", a.rank, a.world) + text_of(h.nonce) + text_of(a.nonce));
}

Digest proof_of(const std::string &secret, const Hello &h, const Application &a, const Answer &answer) {
    return hmac_sha256(secret,
                       format("answer %d of %d", int(answer.verdict), answer.world) + text_of(h.nonce) + text_of(a.nonce));
}

bool is_open(const Socket &s) {
    char byte;
    const ssize_t n = s ? recv(s.fd(), &byte, 1, MSG_PEEK) : 0;
    return n > 0 || (n < 0 && can_go_on());
}

// Rank 0's side: connections that have not proved the secret yet.
class Doorkeeper {
  public:
    Doorkeeper(const Rendezvous &me, const Address &at, const std::string &secret)
        : world_(int(me.world)), secret_(secret), listener_(listen_at(at)), ranks_(size_t(me.world)) {}

    // Returns the connections to all ranks, or the ones made before the deadline.
    std::vector<Socket> wait(Time deadline) {
        while (!all_there() && Clock::now() < deadline) {
            std::vector<pollfd> fds = {{listener_.fd(), POLLIN, 0}};
            for (const Stranger &s : strangers_) fds.push_back({s.socket.fd(), POLLIN, 0});
            sleep_until(fds, strangers_.empty() ? deadline : std::min(deadline, strangers_.front().until));
            for (auto s = strangers_.begin(); s != strangers_.end();) {
                const auto now = s++;
                if (!goes_on(*now)) strangers_.erase(now);
            }
            accept_one();
        }
        return std::move(ranks_);
    }

    int without_secret() const { return without_secret_; }

  private:
    struct Stranger {
        Socket socket;
        Time until;
        Hello hello = new_hello();
        Application application = {};
        size_t got = 0;
    };

    bool all_there() {
        // A process that has ended may have been restarted.
        for (Socket &s : ranks_)
            if (!is_open(s)) s = Socket();
        return std::count_if(ranks_.begin(), ranks_.end(), [](const Socket &s) { return bool(s); }) == world_ - 1;
    }

    // There is always room for one more stranger: the oldest is dropped.
    void accept_one() {
        Socket s(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        const bool no_place = !s && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM);
        if (no_place && strangers_.empty()) die("cannot accept a connection: %s\n  fix: raise ulimit -n", strerror(errno));
        if (no_place || (s && strangers_.size() >= most_strangers + ranks_.size())) strangers_.pop_front();
        if (!s) return;
        send_at_once(s);
        Stranger &stranger = strangers_.emplace_back(Stranger{std::move(s), in_seconds(longest_proof)});
        if (!stranger.socket.send_all(&stranger.hello, sizeof(Hello), Clock::now())) strangers_.pop_back();
    }

    // Reads arrived bytes. Returns false when no more are expected.
    bool goes_on(Stranger &s) {
        const ssize_t n = recv(s.socket.fd(), reinterpret_cast<char *>(&s.application) + s.got, sizeof(Application) - s.got, 0);
        if (n < 0 && can_go_on()) return Clock::now() < s.until;
        if (n <= 0) return false;
        s.got += size_t(n);
        if (s.got < sizeof(Application)) return Clock::now() < s.until;
        const Application &a = s.application;
        if (!same_digest(a.proof, proof_of(secret_, s.hello, a))) return without_secret_++, false;
        const bool fits = a.world == world_ && a.rank > 0 && a.rank < world_;
        Answer answer = {!fits ? unfit : is_open(ranks_[size_t(a.rank)]) ? taken : welcome, world_, {}};
        answer.proof = proof_of(secret_, s.hello, a, answer);
        const bool said = s.socket.send_all(&answer, sizeof(answer), Clock::now());
        if (said && answer.verdict == welcome) ranks_[size_t(a.rank)] = std::move(s.socket);
        return false;
    }

    const int world_;
    const std::string secret_;
    const Socket listener_;
    std::vector<Socket> ranks_;
    std::list<Stranger> strangers_;  // the oldest first
    int without_secret_ = 0;         // number of connections with a wrong proof
};

std::vector<Socket> gather(const Rendezvous &me, const Address &at, const std::string &secret, double timeout) {
    Doorkeeper door(me, at, secret);
    std::vector<Socket> ranks = door.wait(in_seconds(timeout));
    std::string missing;
    for (size_t r = 1; r < ranks.size(); r++)
        if (!ranks[r]) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    if (!missing.empty())
        die("some of the %d ranks have not connected to %s within %g s: %s%s\n  fix: start them, all with the same --rendezvous",
            int(me.world), me.address.c_str(), timeout, missing.c_str(),
            door.without_secret() ? format(" (%d connections had another secret)", door.without_secret()).c_str() : "");
    for (const Socket &s : ranks)
        if (s) s.send_all("!", 1, in_seconds(longest_answer));
    return ranks;
}

Socket join(const Rendezvous &me, const Address &address, const std::string &secret, double timeout) {
    const double search = std::min(timeout, longest_search);
    const char *const at = me.address.c_str();
    int error = 0;
    Socket s = connect_to(address, in_seconds(search), error);
    if (!s)
        die("nobody answers at %s, where rank 0 should be, for %g s: %s\n  fix: start rank 0 there, with the same --rendezvous; if it runs, a "
            "firewall is in between, or its machine takes that name for an address of its own (127.0.1.1 in /etc/hosts)",
            at, search, strerror(error));
    Hello hello;
    const Time deadline = in_seconds(std::min(timeout, longest_answer));
    if (!s.receive_all(&hello, sizeof(hello), deadline) || memcmp(hello.magic, magic, sizeof(hello.magic)) != 0)
        die("another program answers at %s, not rank 0\n  fix: give --rendezvous another port on all ranks", at);
    if (hello.version != version)
        die("rank 0 at %s is another version of this program\n  fix: run the same version on all machines", at);

    Application mine = {int32_t(me.rank), int32_t(me.world), new_nonce(), {}};
    mine.proof = proof_of(secret, hello, mine);
    Answer answer;
    if (!s.send_all(&mine, sizeof(mine), deadline) || !s.receive_all(&answer, sizeof(answer), deadline) ||
        !same_digest(answer.proof, proof_of(secret, hello, mine, answer)))
        die("rank 0 at %s does not know this rank's secret\n  fix: set the same LLMC_RENDEZVOUS_SECRET in the environment of all ranks",
            at);
    if (answer.world != me.world)
        die("this process has --rank %d/%d, but rank 0 at %s has 0/%d\n  fix: give all ranks the same number of processes",
            int(me.rank), int(me.world), at, answer.world);
    if (answer.verdict != welcome)
        die("another process is already rank %d at %s\n  fix: give each process its own --rank, from 0 to %d", int(me.rank), at,
            int(me.world) - 1);

    char begin;
    if (!s.receive_all(&begin, 1, in_seconds(timeout + longest_search)))
        die("rank 0 at %s ended before all ranks had connected\n  fix: see its error message", at);
    return s;
}

}  // namespace

std::vector<Socket> meet(const Rendezvous &me, double timeout) {
    if (me.world < 1 || me.world > most_ranks)
        die("--rank %lld/%lld\n  fix: give a number of processes from 1 to %d", static_cast<long long>(me.rank),
            static_cast<long long>(me.world), most_ranks);
    if (me.rank < 0 || me.rank >= me.world)
        die("--rank %lld/%d: there is no such process\n  fix: from 0/%d to %d/%d", static_cast<long long>(me.rank), int(me.world),
            int(me.world), int(me.world) - 1, int(me.world));
    const Address address = parse_address(me.address);
    const std::string secret = secret_for(address);
    if (me.rank == 0) return gather(me, address, secret, timeout);
    std::vector<Socket> out;
    out.push_back(join(me, address, secret, timeout));
    return out;
}
