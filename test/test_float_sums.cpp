// The allowed errors of sums (float_sums.h) against sums that are made as tensor cores make them.
#include "float_sums.h"

#include <gtest/gtest.h>

#include <vector>

#include "../llmc/core/rng.h"

namespace {

double cut_off(double x, double unit) { return std::trunc(x / unit) * unit; }
double ulp(double x) { return std::exp2(std::floor(std::log2(std::abs(x))) - 23); }  // of a float

// Without a bit more than a float has.
double truncated_sum(const std::vector<double> &terms) {
    double sum = 0;
    for (size_t n = 0; n < terms.size(); n += tensor_core_block) {
        const size_t end = std::min(n + tensor_core_block, terms.size());
        double largest = std::abs(sum), block = 0;
        for (size_t i = n; i < end; i++) largest = std::max(largest, std::abs(terms[i]));
        block = cut_off(sum, ulp(largest));
        for (size_t i = n; i < end; i++) block += cut_off(terms[i], ulp(largest));
        sum = cut_off(block, ulp(block));
    }
    return sum;
}

double relative_error(const std::vector<double> &terms) {
    double sum = 0, size = 0;
    for (double x : terms) sum += x, size += std::abs(x);
    return std::abs(truncated_sum(terms) - sum) / size;
}

}  // namespace

TEST(FloatSums, WhatTensorCoresLoseIsAllowed) {
    const Random random{1, Purpose::test, 0};
    double most = 0;
    for (size_t n : {1, 8, 9, 64, 300, 4096})
        for (size_t run = 0; run < 20; run++) {
            std::vector<double> normal(n), positive(n);
            for (size_t i = 0; i < n; i++) normal[i] = random.normal(run * n + i), positive[i] = 1 + random.uniform(run * n + i);
            for (const auto &terms : {normal, positive}) {
                EXPECT_LE(relative_error(terms), truncated_sum_error(n)) << n;
                most = std::max(most, relative_error(terms) / truncated_sum_error(n));
            }
        }
    printf("  %.2g of the bound\n", most);
}

// Terms of one sign, each of which loses almost an ulp of the sum: the bound for rounding to nearest is too small.
TEST(FloatSums, TruncationIsWorseThanRounding) {
    const size_t n = 4096;
    std::vector<double> terms(n, 0x1.fffffep-13);  // products of bf16 have up to 16 bits, and sums of them more
    terms[0] = 1;
    EXPECT_GT(relative_error(terms), rounded_sum_error(n));
    EXPECT_LE(relative_error(terms), truncated_sum_error(n));
}
