// The frozen reference model of dpo, which computes log p of every document's answer.
//
//   --ref_mode precompute   runs one forward sweep before training and then frees the model. A double for each document stays in memory, and in a
//                           cache file for later runs, named by a hash of the data, the model and the dtype
//   --ref_mode resident     keeps a second model in memory and evaluates it row by row; the same rows give the same bits. kto needs this mode, because
//                           its mismatched pairs (unpaired.h) are only known in their step
//
// If new adapters are trained, the reference is the trained model without them, and neither a sweep nor a second model is needed.
#pragma once
#include <map>
#include <memory>

#include "run.h"

// True if the reference is the base of the adapters: Model::evaluate_base.
bool reference_is_base(const Run &run);

ModelSpec reference_spec(const Run &run);  // the language model of --ref_model, by default --model

// Opens a frozen model, which evaluates rows within `limits`.
std::unique_ptr<Model> open_frozen(const Run &run, const ModelSpec &model, const ModelLimits &limits);

class Reference {
  public:
    static std::vector<CoResidentModel> co_residents(const Run &run);  // the second model, if there will be one

    // All ranks make all calls together, except for logps(), which the ranks of a ring make together.
    Reference(const Run &run, const ModelLimits &limits);

    void use(const Samples &data, size_t samples);  // announces that logps() will be called for the first `samples`

    // Returns log p, in nats, of the documents of a row. In mode precompute the row is of announced data. `trained` is the trained model, which has not
    // evaluated the row yet.
    std::vector<double> logps(Model &trained, const Samples &data, const Row &row);

  private:
    std::string side_file(const Samples &data, size_t documents) const;
    std::vector<double> precompute(const Samples &data, size_t samples) const;

    const Run &run_;
    const ModelSpec spec_;
    ModelLimits limits_;
    std::unique_ptr<Model> model_;                                // the second model, or null
    std::map<const Samples *, std::vector<double>> precomputed_;  // (documents)
};
