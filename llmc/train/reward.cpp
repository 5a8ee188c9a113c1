#include "reward.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "../core/common.h"
#include "../core/file.h"
#include "../data/python.h"

using nlohmann::json;

void RewardFunction::start() {
    if (!std::filesystem::exists(file_)) die("--reward %s: no such file\n  fix: exact_match, or a Python file", file_.c_str());
    std::string command[] = {python_program(), program_file("data/reward_worker.py"), file_};
    int ends[2];
    const bool made = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0;
    process_ = made ? fork() : -1;
    if (process_ < 0) die("cannot start %s: %s", command[0].c_str(), strerror(errno));
    if (process_ == 0) {
        dup2(ends[1], STDIN_FILENO), dup2(ends[1], STDOUT_FILENO);
        execlp(command[0].c_str(), command[0].c_str(), command[1].c_str(), command[2].c_str(), nullptr);
        _exit(127);
    }
    close(ends[1]);
    socket_ = ends[0];
}

void RewardFunction::stop() {
    if (process_ < 0) return;
    close(socket_);
    kill(process_, SIGKILL);
    while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {}
    process_ = -1;
}

bool RewardFunction::call(const std::string &request, std::string &reply) {
    for (size_t sent = 0; sent < request.size();) {
        const ssize_t n = send(socket_, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        sent += size_t(n);
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_);
    char buffer[65536];
    while (!reply.ends_with('\n')) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
        pollfd wait{socket_, POLLIN, 0};
        const int ready = left.count() > 0 ? poll(&wait, 1, int(left.count())) : 0;
        if (ready < 0 && errno == EINTR) continue;
        if (ready <= 0)
            die("%s took longer than %g s for a batch of rewards\n  fix: a larger --reward_timeout, or a smaller --rollout_batch_size",
                file_.c_str(), timeout_);
        const ssize_t n = recv(socket_, buffer, sizeof(buffer), 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        reply.append(buffer, size_t(n));
    }
    return true;
}

std::vector<double> RewardFunction::operator()(const Answered &batch) {
    if (batch.answers.empty()) return {};
    const json request = {{"prompts", batch.prompts}, {"answers", batch.answers}, {"labels", batch.labels}};
    const std::string line = request.dump(-1, ' ', true, json::error_handler_t::replace) + "\n";
    std::string reply;
    for (int attempt = 0; reply.empty(); attempt++) {
        if (process_ < 0) start();
        if (call(line, reply)) break;
        stop();
        reply.clear();
        if (attempt == 1)
            die("the process that runs %s ended without an answer, twice\n  fix: look above for what it said; run: python3 data/reward_worker.py %s",
                file_.c_str(), file_.c_str());
    }
    const json answer = json::parse(reply, nullptr, false);
    if (!answer.is_object()) die("%s: the worker's answer is not JSON\n  fix: leave its standard output alone", file_.c_str());
    if (answer.contains("error"))
        die("%s: %s\n  fix: that function, which docs/rl.md describes", file_.c_str(),
            answer["error"].get<std::string>().c_str());
    const json &rewards = answer["rewards"];
    if (rewards.size() != batch.answers.size())
        die("%s returned %zu rewards for %zu answers\n  fix: one for each of them", file_.c_str(), rewards.size(),
            batch.answers.size());
    std::vector<double> out;
    for (const json &r : rewards) {
        if (!r.is_number() || !std::isfinite(r.get<double>()))
            die("%s returned %s for answer %zu\n  fix: a finite number", file_.c_str(), r.dump().c_str(), out.size());
        out.push_back(r.get<double>());
    }
    return out;
}
