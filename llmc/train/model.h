// What the tasks of llmc/train/run.h ask of a model. Calls are coarse, a packed row or an optimizer step each, so a runtime interface is
// right here; inside, a model is a template on its device.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "../core/arena.h"
#include "../data/dataloader.h"
#include "../io/checkpoint.h"
#include "../ops/adamw.h"
#include "../ops/attention.h"
#include "../parallel/mesh.h"
#include "../parallel/zero.h"
#include "ranks.h"

// Sums over target tokens; divide by `targets` for means. nll and entropy in nats.
struct LossSums {
    double nll = 0, entropy = 0, correct = 0, targets = 0;
    LossSums &operator+=(const LossSums &o) {
        return nll += o.nll, entropy += o.entropy, correct += o.correct, targets += o.targets, *this;
    }
};

// What is kept of the forward pass for the backward pass; the rest is computed again. Less memory, more work, the same bits.
enum class Recompute { none, cheap, layer };  // cheap: norms and SwiGLU; layer: all but layer inputs, attention output and lse

// A value that is not finite, after so many ops; in words: the op, the array and the element.
struct Anomaly {
    size_t ops = SIZE_MAX;
    std::string what;
};

enum class Mode { train, evaluate, generate };

struct ModelLimits {
    Mode mode = Mode::train;
    size_t row_tokens = 2048;  // T of the longest row, a multiple of row_multiple
    size_t positions = 2048;   // longest document, for the rope table
    Recompute recompute = Recompute::none;
    bool bf16_moments = false;  // of AdamW
    size_t cache_tokens = 0;    // positions of the key/value cache; 0: next_logits() will not be called
    Ranks ranks;
};

class Model {
  public:
    virtual ~Model() = default;

    virtual Plan &plan() = 0;                // placed by allocate(), or by the caller who only wants to look
    virtual void profile() = 0;              // steps from now on; before allocate()
    virtual class Profiler *profiler() = 0;  // null unless profile() was called
    // `mesh` is that of limits.ranks and lives as long as the model. guards, poison: debugging aids of arena.h
    virtual void allocate(Mesh &mesh, bool guards, bool poison) = 0;
    virtual Arena &arena() = 0;
    virtual Memory &memory() = 0;  // in which the arena lies
    virtual const std::vector<Tensor> &tensors() const = 0;

    // Every tensor of the table; a rank reads by itself what it needs. The seed is for a reward model that begins as a language model.
    virtual void load(const class HfWeights &, uint64_t seed) = 0;

    // All ranks make these calls together. A row is that of a ring: its ranks give the same.
    virtual void initialise(uint64_t seed) = 0;  // random weights, a function of seed and tensor name alone
    // Weights only, by rank 0; config and tokenizer are the caller's. Ends in an error that all ranks agree on, or in none.
    virtual void save(const std::string &dir, const std::string &export_dtype) = 0;
    // Forward. Returns of each document the sum of its targets' nll, or its score (ModelConfig::reward), summed over the ring: its ranks get
    // the same. The sums of take_sums() add up. Rings may take different numbers of rows.
    virtual std::vector<double> evaluate(const Row &) = 0;
    virtual void zero_gradients() = 0;
    // Backward of the row that evaluate() was given last, of a loss whose derivative by the value of document i is weights[i]. Gradients add
    // up. A row without tokens: this ring has none in this micro-step. `last` of the step: gradients are summed over ranks, if that was
    // not done before.
    virtual void backward(std::span<const float> weights, bool last) = 0;
    // Both in one, for weight * sum of nll, which is known beforehand: a language model's head then computes its logits once.
    virtual void accumulate(const Row &, float weight, bool last) = 0;
    virtual double gradient_norm() = 0;
    virtual std::string nonfinite_gradient() = 0;  // name of the first tensor whose gradient is not finite
    virtual void detect_anomaly() = 0;             // from now on looks at what each op has written, which is slow
    virtual Anomaly anomaly() = 0;                 // the first found by this rank
    virtual void update(const AdamW &) = 0;        // one step over all parameters; weight decay as the table says
    virtual void optimizer_state_loaded() = 0;     // the other ranks' parameters follow
    virtual void gather_parameters() = 0;          // now, all that the two have begun to send

    virtual OptimizerState optimizer_state() = 0;  // this rank's part
    virtual LossSums take_sums() = 0;              // of this rank's targets since the last call; only this waits for the device
    virtual Payload take_sent() = 0;               // by this rank since the last call

    // Generation, by this rank alone; while training gather_parameters() comes before. `row` holds the next tokens of some sequences, one
    // document each; where[i] are their positions in the cache, whose sequence begins at cache_begin[position]. Returns (documents, V)
    // logits of each document's last token.
    virtual const float *next_logits(const Row &row, const Pieces &where, std::span<const int32_t> cache_begin) = 0;
};
