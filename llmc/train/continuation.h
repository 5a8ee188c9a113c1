// --sample_every: how the model that is being trained goes on after --prompt.
#pragma once
#include <optional>

#include "../data/tokenizer.h"
#include "run.h"

class Continuation {
  public:
    // All ranks make all calls together. This one reads the prompt; dies without a tokenizer, or positions for what may follow.
    explicit Continuation(const Run &run);

    void use(ModelLimits &limits) const;                // the model needs room for it
    std::string text(Model &model, size_t step) const;  // a function of the weights, --seed and the step

  private:
    const Run &run_;
    std::optional<Tokenizer> tokenizer_;
    std::vector<int32_t> prompt_;
};
