// How processes that were started by hand find each other: rank 0 listens at an address that all know, the others tell it where they
// listen themselves, and then all pairs connect.
#pragma once
#include <chrono>
#include <string>
#include <utility>
#include <vector>

struct Rendezvous {
    int rank, world;
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

    // Move all bytes, or return false if the other side has closed or has moved no byte until the deadline.
    using Time = std::chrono::steady_clock::time_point;
    bool send_all(const void *data, size_t bytes, Time deadline) const;
    bool receive_all(void *data, size_t bytes, Time deadline) const;

  private:
    int fd_;
};

bool can_go_on();  // says whether the last call on a socket failed only because it would have had to wait

struct Connections {  // [r] is the connection to rank r; there is none to this rank itself
    std::vector<Socket> data, control;
};

// Returns when this rank is connected to all others. It looks for rank 0 for at most a minute, and waits `timeout` seconds for the others.
Connections connect_all(const Rendezvous &rendezvous, double timeout);
