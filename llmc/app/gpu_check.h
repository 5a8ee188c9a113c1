// The check of a GPU before its first step: a tiny model of the run's kind makes every call of a task (../model/every_call.h) on the CPU and then on the GPU.
// After each op all arrays that later ops read are compared, and then overwritten with the CPU's, so that each op is judged separately. A fault of a driver,
// a compiler or a GPU becomes a message that names the op and the array, instead of a model that learns nothing.
#pragma once
#include <string>
#include <vector>

#include "../train/run.h"

// Compares the models of two factories. No element may differ by more than a share of the largest magnitude in its array on the CPU. The share allows for
// roundings in another order; a wrong kernel errs by the size of its values. `rounded`: products are of bf16 or TF32. Returns how many ops agree, or dies
// with the first that does not.
size_t check_gpu(const ModelFactory &gpu, const ModelFactory &cpu, const ModelConfig &config, const ModelLimits &limits,
                 bool rounded);

// The kernels that a model of this configuration launches depend on what this text names.
std::string kernels_of(const ModelConfig &config, const ModelLimits &limits);

// Whether the option gpu_check (always | once | never) asks for a check. `once` keeps the passed checks in the user's cache: `key` names the GPU,
// the driver and the kind of model, and the program is added here.
bool gpu_check_is_due(const std::string &option, const std::string &key);
void remember_gpu_check(const std::string &key);
