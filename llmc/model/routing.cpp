#include "routing.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "../ops/router.h"

double Routing::sum(size_t i) const {
    int64_t sum = 0;
    for (size_t l = 0; l < layers(); l++) sum += sums[l * width(experts) + i];
    return double(sum);
}

double Routing::aux_loss() const {
    const double E = double(experts), n = sum(2 * experts + 1);
    double loss = 0;
    for (size_t e = 0; e < experts; e++) loss += E * (sum(e) / n) * (sum(experts + e) / double(router_unit) / n);
    return loss;
}

std::vector<float> Routing::balance(double coefficient) const {
    const double E = double(experts), n = sum(2 * experts + 1);
    std::vector<float> out(experts);
    for (size_t e = 0; n > 0 && e < experts; e++) out[e] = float(coefficient * E * (sum(e) / n) / n);
    return out;
}

void Routing::add_to(nlohmann::ordered_json &line) const {
    const double n = sum(2 * experts + 1);
    double least = INFINITY;
    std::vector<double> largest;
    for (size_t l = 0; l < layers(); l++) {
        const auto loads = std::span(sums).subspan(l * width(experts), experts);
        double all = 0;
        for (int64_t load : loads) all += double(load);
        if (all == 0) continue;
        const double mean = all / double(experts);
        largest.push_back(double(std::ranges::max(loads)) / mean),
            least = std::min(least, double(std::ranges::min(loads)) / mean);
    }
    line["aux_loss"] = aux_loss();
    line["router_entropy"] = sum(2 * experts) / double(router_unit) / n;
    line["expert_load_max"] = std::ranges::max(largest);
    line["expert_load_min"] = least;
    line["expert_load_max_by_layer"] = largest;
}
