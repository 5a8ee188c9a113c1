// Rewards by a Python function of the user's, which runs in a process of its own (data/reward_worker.py) that lives as long as this object.
#pragma once
#include <sys/types.h>

#include <string>
#include <vector>

// Texts, (answers) each.
struct Answered {
    std::vector<std::string> prompts, answers, labels;
};

class RewardFunction {
  public:
    RewardFunction(const std::string &file, double timeout) : file_(file), timeout_(timeout) {}
    RewardFunction(const RewardFunction &) = delete;
    ~RewardFunction() { stop(); }

    // Returns a reward for each answer. A process that ends without an answer is started anew, once. Dies if the function raises, takes longer
    // than the timeout (seconds), or returns something else than a finite number for each answer.
    std::vector<double> operator()(const Answered &batch);

  private:
    void start();
    void stop();
    bool call(const std::string &request, std::string &reply);  // false if the process has ended

    const std::string file_;
    const double timeout_;
    pid_t process_ = -1;
    int socket_ = -1;
};
