// The reference model of dpo: log p of every document's answer, by a model that is not trained.
//
//   --ref_mode precompute   one forward sweep before training, then the model is gone. Two floats for each pair stay in memory and in a file of
//                           the cache, named by a hash of the data, the model and the dtype, which the next run reads
//   --ref_mode resident     a second model beside the trained one, asked row by row: the same rows give the same bits
#pragma once
#include <map>
#include <memory>

#include "run.h"

// A run like this one, of the model of --ref_model, by default that of --model. Dies unless its tokens are those of the trained one.
Run reference_run(const Run &run);

class Reference {
  public:
    // All ranks make all calls together, but for logps(), which those of a ring make.
    Reference(const Run &run, const ModelLimits &limits);

    void use(const PreparedData &data, size_t pairs);  // its first `pairs` will be asked for

    // log p of the documents of a row of such data, nats.
    std::vector<double> logps(const PreparedData &data, const Row &row);

  private:
    std::unique_ptr<Model> open() const;
    std::string side_file(const PreparedData &data, size_t pairs) const;
    std::vector<double> precompute(const PreparedData &data, size_t pairs) const;

    Run run_;
    ModelLimits limits_;
    std::unique_ptr<Model> model_;                                     // resident
    std::map<const PreparedData *, std::vector<double>> precomputed_;  // (documents)
};
