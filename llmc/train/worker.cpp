#include "worker.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/signals.h"
#include "../data/python.h"

using nlohmann::json;

Worker::Worker(std::string name, std::string script, std::vector<std::string> arguments, double timeout)
    : name_(std::move(name)), script_(std::move(script)), arguments_(std::move(arguments)), timeout_(timeout) {}

void Worker::start() {
    std::vector<std::string> command = {python_program(), program_file(script_)};
    command.insert(command.end(), arguments_.begin(), arguments_.end());
    std::vector<char *> argv;
    for (std::string &word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    int ends[2];
    const bool made = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0;
    process_ = made ? fork() : -1;
    if (process_ < 0)
        die("cannot start %s: %s\n  fix: close other programs, which hold memory, processes or open files", argv[0],
            strerror(errno));
    if (process_ == 0) {
        setpgid(0, 0);  // Ctrl-C only goes to the run
        dup2(ends[1], STDIN_FILENO), dup2(ends[1], STDOUT_FILENO);
        execvp(argv[0], argv.data());
        _exit(127);
    }
    close(ends[1]);
    socket_ = ends[0];
}

void Worker::stop() {
    if (process_ < 0) return;
    close(socket_);  // the process then ends, with all its child processes (data/worker.py)
    while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {}
    process_ = -1;
    received_.clear();
}

bool Worker::send_line(const json &request) {
    const std::string line = request.dump(-1, ' ', true, json::error_handler_t::replace) + "\n";
    for (size_t sent = 0; sent < line.size();) {
        const ssize_t n = send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        sent += size_t(n);
    }
    return true;
}

bool Worker::receive(int ms) {
    pollfd wait{socket_, POLLIN, 0};
    if (poll(&wait, 1, ms) <= 0) return true;
    char buffer[65536];
    const ssize_t n = recv(socket_, buffer, sizeof(buffer), 0);
    if (n < 0 && errno == EINTR) return true;
    if (n > 0) received_.append(buffer, size_t(n));
    return n > 0;
}

std::string Worker::take_line() {
    const std::string line = received_.substr(0, received_.find('\n') + 1);
    received_.erase(0, line.size());
    return line;
}

bool Worker::call(const json &request, std::string &reply) {
    if (!send_line(request)) return false;
    const Activity activity("without this answer of a worker");
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_);
    while ((reply = take_line()).empty()) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
        stop_if_asked();
        if (left.count() <= 0)
            die("%s took longer than %g s for a batch of rewards\n  fix: raise --comm_timeout, or lower --rollout_batch_size",
                name_.c_str(), timeout_);
        if (!receive(int(std::min<int64_t>(left.count(), 100)))) return false;
    }
    return true;
}

json Worker::read(const std::string &line) const {
    const json answer = json::parse(line, nullptr, false);
    if (!answer.is_object())
        die("%s: its process has answered something else than JSON\n  fix: print to standard error there, not to standard output",
            name_.c_str());
    if (answer.contains("error")) die("%s: %s", name_.c_str(), answer["error"].get<std::string>().c_str());
    return answer;
}

json Worker::ask(const json &request, const char *wanted, size_t n) {
    std::string reply;
    for (int attempt = 0; reply.empty(); attempt++) {
        if (process_ < 0) start();
        if (call(request, reply)) break;
        stop();
        if (attempt == 1)
            die("the process of %s ended without an answer, twice\n  fix: see its messages above; run: python3 %s %s",
                name_.c_str(), script_.c_str(), arguments_[0].c_str());
    }
    const json list = read(reply).at(wanted);
    if (list.size() != n)
        die("%s returned %zu %s for %zu answers\n  fix: return one for each answer", name_.c_str(), list.size(), wanted, n);
    return list;
}

void Worker::tell(const json &request) {
    if (process_ < 0) start();
    if (!send_line(request)) die_of_end();
}

std::optional<json> Worker::hear(int ms) {
    std::string line = take_line();
    if (line.empty() && !receive(ms)) die_of_end();
    if (line.empty()) line = take_line();
    if (line.empty()) return {};
    return read(line);
}

void Worker::die_of_end() {
    stop();
    die("the process of %s ended without an answer\n  fix: see its messages above; the run resumes from its last checkpoint",
        name_.c_str());
}
