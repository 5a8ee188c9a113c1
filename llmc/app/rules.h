// The rules of flags: the words in the rows of ../train/options.def, and the loop over the rows.
#pragma once
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../core/common.h"
#include "../train/advantages.h"
#include "../train/options.h"
#include "../train/preference.h"
#include "../train/reward.h"

struct Must {  // the message: "--x is VALUE but must be RULE"
    std::function<bool(double)> holds;
    std::string rule;
};
inline Must must(bool ok, const char *rule) {
    return {[=](double) { return ok; }, rule};
}
inline Must above(double low) {
    return {[=](double x) { return x > low; }, format("above %g", low)};
}
inline Must at_most(double high) {
    return {[=](double x) { return x <= high; }, format("at most %g", high)};
}
inline Must between(double low, double high) {
    return {[=](double x) { return x >= low && x <= high; }, format("between %g and %g", low, high)};
}
// `zero` is the meaning of 0.
inline Must at_least(double low, const std::string &zero = "") {
    const std::string rule = low > 0 ? format("at least %g", low) : zero.empty() ? "0 or more" : "0 (" + zero + ") or more";
    return {[=](double x) { return x >= low; }, rule};
}

// A number of steps or a share of all. The flag may also be `special`, which has this meaning.
inline Must steps(double special = NAN, const char *meaning = "") {
    const std::string also = std::isnan(special) ? "" : format("%g (%s), ", special, meaning);
    return {[=](double x) { return x == special || (x > 0 && x < 1) || (x >= 1 && x == std::floor(x) && x < 0x1p53); },
            also + "a whole number, or a share of all steps below 1"};
}

struct OneOf {  // "--x is VALUE, use one of"; without names, any value is valid
    std::string names;
};
inline OneOf one_of(const char *names) { return {names}; }
template <class T> OneOf one_of_type(const T &) { return {}; }
template <Choice E> OneOf one_of_type(const E &) { return {choice_names<E>}; }
template <Choice E> OneOf one_of_type(const Auto<E> &) { return {std::string("auto, ") + choice_names<E>}; }

inline bool have_different_names(const std::vector<Teacher> &teachers) {  // a single one has none
    std::set<std::string> names;
    for (const Teacher &teacher : teachers) names.insert(teacher.name);
    return teachers.size() < 2 || (names.size() == teachers.size() && !names.contains(""));
}

struct Excludes {  // "--x and --other were both given"
    bool both;
    const char *other, *why;
};
inline Excludes excludes(bool both, const char *other, const char *why) { return {both, other, why}; }

struct Needs {  // "--x has no effect without", for another value than the default
    bool met;
    const char *what, *fix;
};
inline Needs needs(bool met, const char *what, const char *fix) { return {met, what, fix}; }

// Calls visit(flag, number, rule) for all rules of type R of the task's flags. `number` is the value if it is a number, else 0.
template <class R, class Visit> void each_rule(const Options &o, Task task, const Visit &visit) {
    const auto row = [&]<class T, class... Rules>(const char *flag, const T &value, const Rules &...rules) {
        double number = 0;
        if constexpr (std::is_convertible_v<T, double>) number = double(value);
        const auto one = [&]<class Rule>(const Rule &rule) {
            if constexpr (std::is_same_v<Rule, R>) visit(flag, number, rule);
        };
        (one(rules), ...);
        if constexpr (!(std::is_same_v<Rules, OneOf> || ...)) one(one_of_type(value));
    };
#define NEED(name, met, what, fix) const Needs name = needs(met, what, fix);
#define OPT(type, name, value, tasks, help, ...)  \
    if (task & (tasks)) {                         \
        const auto &x = o.name;                   \
        row(#name, x __VA_OPT__(, ) __VA_ARGS__); \
    }
#include "../train/options.def"
}

// Returns the names that each flag of a task may have. An empty name stands for an empty value.
inline std::map<std::string, std::vector<std::string>> valid_names(Task task) {
    std::map<std::string, std::vector<std::string>> all;
    each_rule<OneOf>(default_options(task), task, [&](const char *flag, double, const OneOf &rule) {
        if (!rule.names.empty()) all[flag] = names_in(rule.names);
    });
    return all;
}
