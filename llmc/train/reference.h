// The reference model of dpo. It is not trained, and gives log p of every document's answer.
//
//   --ref_mode precompute   runs one forward sweep before training and then frees the model. Two floats for each pair stay in memory and in a cache
//                           file, named by a hash of the data, the model and the dtype, which the next run reads
//   --ref_mode resident     keeps a second model in memory and evaluates it row by row; the same rows give the same bits
//
// If adapters are trained from the beginning, the reference is the trained model without them, and there is neither a sweep nor a second model.
#pragma once
#include <map>
#include <memory>

#include "run.h"

// Says that the reference is the base of the adapters: Model::evaluate_base.
bool reference_is_base(const Run &run);

// Returns a run like this one for another model that reads the same tokens, of directory `dir`, or for the run's own if that is empty. Dies if their
// tokenizers differ; `flag` is the flag that names the directory.
Run run_beside(const Run &run, const std::string &dir, const char *flag);

Run reference_run(const Run &run);  // for the language model of --ref_model

// Opens the reference of reference_run(), to be evaluated on rows that suit `limits`.
std::unique_ptr<Model> open_reference(const Run &reference, const ModelLimits &limits);

class Reference {
  public:
    // All ranks make all calls together, except for logps(), which the ranks of a ring make together.
    Reference(const Run &run, const ModelLimits &limits);

    void use(const Samples &data, size_t pairs);  // announces that logps() will be called for the first `pairs`

    // Returns log p, in nats, of the documents of a row of such data.
    std::vector<double> logps(const Samples &data, const Row &row);

  private:
    std::string side_file(const Samples &data, size_t pairs) const;
    std::vector<double> precompute(const Samples &data, size_t pairs) const;

    Run run_;
    ModelLimits limits_;
    std::unique_ptr<Model> model_;                                // null unless --ref_mode resident
    std::map<const Samples *, std::vector<double>> precomputed_;  // (documents)
};
