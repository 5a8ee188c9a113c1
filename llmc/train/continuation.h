// For --sample_every: prints the trained model's continuation of --prompt.
#pragma once
#include <optional>

#include "../data/tokenizer.h"
#include "generation.h"
#include "run.h"

class Continuation {
  public:
    // All ranks make all calls together. The constructor reads the prompt. It dies if the model has no tokenizer, or too few positions.
    explicit Continuation(const Run &run);

    void use(ModelLimits &limits) const;                // adds room for the continuation
    std::string text(Model &model, size_t step) const;  // the continuation: a function of the weights, --seed and the step

  private:
    const Run &run_;
    std::optional<Tokenizer> tokenizer_;
    GenerationSettings settings(size_t step) const;

    std::vector<Prompt> prompt_;  // one
    GenerationLimits generation_limits_{};
};
