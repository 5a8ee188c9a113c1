// The rendezvous of processes started by hand: rank 0 listens at an address that all know, the others connect, and both sides prove
// that they know one secret before they exchange anything else. Other connections are closed and disturb no rank; docs/ranks.md says what this protects.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

struct Rendezvous {
    int64_t rank, world;
    std::string address;  // HOST:PORT of rank 0; an IPv6 address in brackets
};

class Socket {  // is open as long as the object lives, never blocks, and is not inherited by child processes
  public:
    explicit Socket(int fd = -1) : fd_(fd) {}
    Socket(Socket &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Socket &operator=(Socket &&other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Socket();
    int fd() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

    // Move all bytes, or return false if the other side has closed or not all have moved until the deadline.
    using Time = std::chrono::steady_clock::time_point;
    bool send_all(const void *data, size_t bytes, Time deadline) const;
    bool receive_all(void *data, size_t bytes, Time deadline) const;

  private:
    int fd_;
};

bool can_go_on();  // says whether the last call on a socket failed only because it would have had to wait

// Returns when all ranks have come: to rank 0 the connections to all others, [r] to rank r, and to another rank the connection to rank 0, [0]. A rank
// looks for rank 0 for at most a minute, and waits `timeout` seconds for the others. Nobody listens any more when it returns.
// The secret is LLMC_RENDEZVOUS_SECRET of the environment; only an address of this machine alone (127.0.0.1) can do without one.
std::vector<Socket> meet(const Rendezvous &rendezvous, double timeout);
