// A Python script of the project that answers requests, each in turn, or in an order of its own: JSON objects, one per line, on its standard input and output, from where data/worker.py moves
// them to descriptors of their own. The process starts with the first request. It and all its child processes end with this object, and with this
// process.
#pragma once
#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

class Worker {
  public:
    // Messages begin with `name`: the user's file or server that the script calls, or the script's purpose. A request may take `timeout` seconds.
    Worker(std::string name, std::string script, std::vector<std::string> arguments, double timeout);
    Worker(const Worker &) = delete;
    ~Worker() { stop(); }

    // Returns the member `wanted` of the answer, a list of `n`. A process that ends without an answer is restarted once. Dies if that does not help,
    // after a timeout, if the answer is an {"error": text}, or if the list has another length.
    nlohmann::json ask(const nlohmann::json &request, const char *wanted, size_t n);

    // Sends a request, and returns the next answer to any, if it arrives within `ms` milliseconds. Both die if the process has ended, and the second
    // one if the answer is an {"error": text}.
    void tell(const nlohmann::json &request);
    std::optional<nlohmann::json> hear(int ms);
    bool has_begun() const { return process_ >= 0; }

  private:
    void start();
    void stop();
    // These return false if the process has ended.
    bool send_line(const nlohmann::json &request);
    bool receive(int ms);
    bool call(const nlohmann::json &request, std::string &reply);
    std::string take_line();  // the first line that has been received; empty if there is none
    nlohmann::json read(const std::string &line) const;
    [[noreturn]] void die_of_end();

    const std::string name_, script_;
    const std::vector<std::string> arguments_;
    const double timeout_;
    pid_t process_ = -1;
    int socket_ = -1;
    std::string received_;
};
