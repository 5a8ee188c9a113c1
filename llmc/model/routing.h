// Statistics of the routing of a step's tokens in a mixture of experts: the load of each expert, and the auxiliary loss that balances the loads
// (Fedus, Zoph and Shazeer, "Switch transformers", JMLR 2022), with transformers' load_balancing_loss_func as reference. With E experts and n tokens,
// each counted once per layer with experts:
//
//   aux_loss = E sum_e f_e P_e     f_e = (tokens that chose e) / n     P_e = (sum of p[e] over tokens) / n
//
// Both sums are over all layers and the whole step, so the loss is not a mean of means. f_e has no derivative, and d aux_loss / d p[e] = E f_e / n
// for each token.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "config.h"

struct Routing {
    size_t experts = 0;              // E; 0: the model has no experts
    std::vector<int64_t> sums = {};  // (layers, 2E + 2) router_sums of ../ops/router.h; all 0 for a layer without experts

    static size_t width(size_t experts) { return 2 * experts + 2; }  // number of sums per layer

    double aux_loss() const;
    // Returns (E) the derivatives of coefficient * aux_loss with respect to p of a token.
    std::vector<float> balance(double coefficient) const;

    // Adds aux_loss; router_entropy, the mean over tokens, in nats; and the loads of experts relative to the mean load of their layer: the largest in
    // each layer and overall, and the smallest overall.
    void add_to(nlohmann::ordered_json &line) const;

  private:
    size_t layers() const { return sums.size() / width(experts); }
    double sum(size_t i) const;  // over layers
};
