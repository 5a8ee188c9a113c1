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
}

bool Worker::call(const std::string &line, std::string &reply) {
    for (size_t sent = 0; sent < line.size();) {
        const ssize_t n = send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        sent += size_t(n);
    }
    const Activity activity("without this answer of a worker");
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_);
    char buffer[65536];
    while (!reply.ends_with('\n')) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
        pollfd wait{socket_, POLLIN, 0};
        stop_if_asked();
        const int ready = left.count() > 0 ? poll(&wait, 1, int(std::min<int64_t>(left.count(), 100))) : 0;
        if (left.count() > 0 && ready <= 0) continue;
        if (ready <= 0)
            die("%s took longer than %g s for a batch of rewards\n  fix: raise --comm_timeout, or lower --rollout_batch_size",
                name_.c_str(), timeout_);
        const ssize_t n = recv(socket_, buffer, sizeof(buffer), 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        reply.append(buffer, size_t(n));
    }
    return true;
}

json Worker::ask(const json &request, const char *wanted, size_t n) {
    const std::string line = request.dump(-1, ' ', true, json::error_handler_t::replace) + "\n";
    std::string reply;
    for (int attempt = 0; reply.empty(); attempt++) {
        if (process_ < 0) start();
        if (call(line, reply)) break;
        stop();
        reply.clear();
        if (attempt == 1)
            die("the process of %s ended without an answer, twice\n  fix: see its messages above; run: python3 %s %s",
                name_.c_str(), script_.c_str(), arguments_[0].c_str());
    }
    const json answer = json::parse(reply, nullptr, false);
    if (!answer.is_object())
        die("%s: its process has answered something else than JSON\n  fix: print to standard error there, not to standard output",
            name_.c_str());
    if (answer.contains("error")) die("%s: %s", name_.c_str(), answer["error"].get<std::string>().c_str());
    const json &list = answer.at(wanted);
    if (list.size() != n)
        die("%s returned %zu %s for %zu answers\n  fix: return one for each answer", name_.c_str(), list.size(), wanted, n);
    return list;
}
