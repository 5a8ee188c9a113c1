// The check of a GPU before its first step: a tiny model of the run's kind makes every call of a task (../model/every_call.h) on the CPU and then on
// the GPU. After each op, all arrays that later ops read are compared, and then overwritten with the CPU's values, so each op is checked separately.
// A fault of a driver, a compiler or a GPU becomes a message that names the op and the array, instead of a model that learns nothing.
#pragma once
#include <string>
#include <vector>

#include "../train/run.h"

// Compares the models of two factories. No element may differ by more than a share of the largest magnitude in its array on the CPU. The share allows
// for roundings in another order; a wrong kernel has errors of the size of its values. `rounded`: products are in bf16 or TF32. Returns the number of
// ops that agree, or dies with the first that does not.
size_t check_gpu(const ModelFactory &gpu, const ModelFactory &cpu, const ModelConfig &config, const ModelLimits &limits,
                 bool rounded);

// Returns a text with all properties of a configuration that affect the launched kernels.
std::string kernels_of(const ModelConfig &config, const ModelLimits &limits);

// True if --gpu_check requests a check. `once` stores passed checks in the user's cache: `key` names the GPU, the
// driver and the kind of model; this function adds the program.
bool gpu_check_is_due(GpuCheck wanted, const std::string &key);
void remember_gpu_check(const std::string &key);
