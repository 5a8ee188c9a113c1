// Episodes of a user's Python class (--environment FILE.py), which a separate process plays (data/environment_worker.py). The ranks of a tensor group
// compute the same sequences, so the first of them asks, and all continue by its replies.
#pragma once
#include <exception>

#include "environment.h"
#include "reward.h"
#include "worker.h"

class PythonEnvironment final : public Environment {
  public:
    PythonEnvironment(const Run &run, const Tokenizer &tokenizer);  // both must outlive this object

    // Begins `samples` episodes for each of this rank's prompts, which own_prompts() has returned for those asked, numbered from `first` on. Returns the
    // prompt of each episode: the environment may have appended a text, and no two of them need be the same.
    std::vector<Prompt> begin(const Questions &asked, std::span<const Prompt> own, size_t first, size_t samples);
    void act(const Turn &turn) override;
    std::vector<Reply> replies(bool wait) override;
    bool failed() const override { return error_ != nullptr; }
    bool has_tools() const { return has_tools_; }  // its replies count calls
    void check() const;                            // throws the error of an environment that has failed

  private:
    void reset(const Questions &asked, size_t first, size_t samples, std::vector<Prompt> &episodes);
    void tell(const nlohmann::json &request);
    std::optional<nlohmann::json> next(bool wait);
    std::vector<int32_t> known(const nlohmann::json &ids) const;

    const Run &run_;
    const Tokenizer &tokenizer_;
    const StopStrings stop_;
    Worker worker_;
    bool has_tools_ = false;
    std::chrono::steady_clock::time_point last_;  // when the process was last asked, or replied
    std::exception_ptr error_;
};
