// --sample_every: how the model that is being trained goes on after --prompt.
#pragma once
#include <optional>

#include "../data/tokenizer.h"
#include "run.h"

class Continuation {
  public:
    // All ranks make all calls together.
    explicit Continuation(
        const Run &run);  // reads the prompt; dies where there is no tokenizer, or no position for what may follow

    void use(ModelLimits &limits) const;                // the model needs room for it
    std::string text(Model &model, size_t step) const;  // a function of the weights, --seed and the step

  private:
    const Run &run_;
    std::optional<Tokenizer> tokenizer_;
    std::vector<int32_t> prompt_;
};
