// Tables of the counts of kernels.
#pragma once
#include "prediction.h"
#include "runtime.h"

namespace ptx {

// Prints a table with a line for each kernel and shape. Figures are per launch, the mean over equal launches. `what` is the first column.
void print_counts_header(bool csv);
void print_counts(const std::string &what, const std::vector<Launches> &all, const std::map<std::string, MachineCode> &code,
                  bool csv);
}  // namespace ptx
