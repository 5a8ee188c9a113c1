// The rendezvous of processes started by hand: rank 0 listens at an address that all ranks know, the other ranks connect, and both sides prove that
// they know one secret before they exchange anything else. Other connections are closed and do not disturb any rank; docs/ranks.md explains the
// protection.
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

class Socket {  // open during the object's lifetime, non-blocking, and not inherited by child processes
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

bool can_go_on();  // true if the last call on a socket only failed because it would have blocked

// Returns when all ranks have connected: on rank 0 the connections to all other ranks, [r] to rank r; on another rank the connection to rank 0, [0].
// A rank looks for rank 0 for at most a minute, and waits `timeout` seconds for the others. When the call returns, no rank listens any more.
// The secret is LLMC_RENDEZVOUS_SECRET in the environment; only a loopback address (127.0.0.1) needs none.
std::vector<Socket> meet(const Rendezvous &rendezvous, double timeout);
