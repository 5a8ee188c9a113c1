// The interfaces through which the tasks of llmc/train/run.h use a model: Model loads, evaluates and saves it, Trainee has the calls of an optimizer step,
// Generator continues texts, and Diagnosis says what it costs. Each call processes a packed row or an optimizer step, so virtual
// calls cost nothing here; inside, a model is a template on its device.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../core/arena.h"
#include "../data/dataloader.h"
#include "../ops/settings.h"
#include "../parallel/mesh.h"
#include "../parallel/optimizer_state.h"
#include "../parallel/pieces.h"
#include "op_list.h"
#include "ranks.h"
#include "routing.h"
#include "table.h"
#include "trace.h"

// Sums over target tokens; divided by `targets` they are means. nll and entropy are in nats.
struct LossSums {
    double nll = 0, entropy = 0, correct = 0, targets = 0;
    LossSums &operator+=(const LossSums &o) {
        return nll += o.nll, entropy += o.entropy, correct += o.correct, targets += o.targets, *this;
    }
};

enum class Mode { train, evaluate, generate, teach };  // teach: only Model::teach() is called

// The final hidden states of a row and the head that turns them into logits, by a teacher with C channels: arrays on its device, X each.
struct TeacherRow {
    const void *x, *w;  // (T, C), (V, C)
    size_t C;
};

// What a student's plan knows of its teacher. The first V rows of both heads are compared.
struct TeacherShape {
    size_t C = 0, V = 0;   // C = 0: there is no teacher
    float beta = 1;        // ../ops/divergence.h
    bool is_base = false;  // the teacher is the student without its adapters
};

// Sums over target tokens, like LossSums, which it has for both models.
struct DivergenceSums {
    LossSums student, teacher;
    double divergence = 0, agreement = 0;
    DivergenceSums &operator+=(const DivergenceSums &o) {
        student += o.student, teacher += o.teacher, divergence += o.divergence, agreement += o.agreement;
        return *this;
    }
};

// The arrays that are offloaded to a store (../core/store.h) between uses.
struct Offload {
    bool activations = false;  // the activations that layers keep for the backward pass
    bool optimizer = false;    // AdamW's moments
    bool weights = false;      // the trained weights, or the frozen base if adapters are trained
    std::string dir = "";      // --offload_dir
    double patience = 600;     // seconds
    size_t piece = offload_piece;
};

struct ModelLimits {
    Mode mode = Mode::train;
    size_t row_tokens = 2048;  // T of the longest row, a multiple of row_multiple
    size_t positions = 2048;   // longest document, for the rope table
    Recompute recompute = Recompute::none;
    size_t tile_tokens = 0;                // Decoder::tile
    size_t head_chunk = least_head_chunk;  // bytes of its logits; on CPUs (../ops/loss.h)
    bool muon = false;                     // Muon updates the layers' matrices, and AdamW all other tensors
    Moments moments = Moments::f32;        // of the optimizer
    bool fp8 = false;                      // FP8 in products of the layers' matrices, except in generation (../ops/fp8.h)
    bool bf16_gradients = false;           // storage of gradients between micro-steps (../parallel/zero.h)
    Offload offload;
    bool share_prompts = false;                   // rows may share prompts (../data/row.h)
    bool graphs = false;                          // record and replay the launches of a layer (../core/graphs.h)
    TeacherShape teacher;                         // the model is a student: it only learns by distil()
    std::shared_ptr<const ModelConfig> split_as;  // the model whose attention decides how a ring splits a row; null: this one
    float temperature = 1;      // divides the head's logits, so nll and entropy refer to the sampling distribution
    float neftune_alpha = 0;    // embeddings have noise of at most this / sqrt(tokens of the document * C): noise.h
    size_t cache_pages = 0;     // pages of the key/value cache; 0: next_logits() will not be called
    size_t sequences = 0;       // most documents in a row of next_logits()
    size_t appended = 0;        // most tokens that see the cache in such a row, besides the newest of each document
    size_t sequence_pages = 0;  // most pages of a sequence
    size_t draws = 0;           // most tokens in a call of draw()
    size_t occurred = 0;        // most tokens of all documents together, with a repetition penalty
    bool concurrent = false;    // runs concurrently with another model, using half of the CPU's threads
    Ranks ranks;
};

// The slots for states of linear attention: one for each sequence of a row, and one for a prompt whose samples have not all begun.
inline size_t state_slots(size_t sequences) { return sequences + 1; }

// Describes the documents of a row of next_logits(), the pages of the cache (attention_decode.h) that hold their keys and values, and the slots that hold
// their states (delta_decode.h). The caller assigns pages and slots to sequences.
struct CacheStep {
    // True: whole sequences from their beginning, which only see themselves. False: the newest tokens of each sequence, which see the cache; with linear
    // attention one of each.
    bool prompts;
    std::vector<int32_t> slots;        // (T) the row of the cache for each token's key and value; -1 for padding
    std::vector<int32_t> table;        // (T, sequence_pages) the pages of each token's sequence; only for newest tokens
    std::vector<int32_t> length;       // (T) the tokens of the sequence up to this one; only for newest tokens
    std::vector<int32_t> states = {};  // (T) the slot of the sequence whose newest token this is; -1 for other tokens
};

// Tokens to draw from the logits of each document (sample.h).
struct DrawRequest {
    Sampling sampling;
    size_t vocabulary;  // ids that may be drawn
    bool logps;         // true if log-probabilities are requested
    std::vector<int32_t> first = {0};
    std::vector<uint64_t> random = {};
    std::vector<int32_t> first_occurred = {0}, occurred = {};
};
struct DrawnTokens {
    std::vector<int32_t> tokens;
    std::vector<float> logps;
};

// The events of two rehearsed steps (prediction.h), and the costs of their ops.
struct RehearsedSteps {
    const OpList &ops;
    Work layout;  // with the sizes of a row still 0
    const Table &trained;
    std::vector<Event> events;
    size_t tokens;  // of a rank's part of a rehearsed row
};

// Continues sequences. Only this rank calls the functions, except finish(). During training, Model::gather_parameters() must be called first.
class Generator {
  public:
    virtual ~Generator() = default;
    // Computes the logits of each document's last token. Afterwards logits() returns them, (documents, V), or draw() draws tokens from them, once.
    virtual void next_logits(const Row &row, const CacheStep &step) = 0;
    virtual std::vector<float> logits() = 0;
    virtual DrawnTokens draw(const DrawRequest &request) = 0;
    virtual void copy_cache_page(size_t to, size_t from) = 0;
    virtual void copy_state(size_t to, size_t from) = 0;  // of all layers with linear attention, from slot to slot
    // True if generation is to stop: this rank wants to, or another one that computes the same passes.
    virtual bool stops(bool wants) = 0;
    // All ranks of a model in training call it after generation. It returns when all ranks have called it: if weights are divided, the other ranks
    // still need this rank's part.
    virtual void finish() = 0;
};

// What a model says about itself: its memory, its ops, and the cost of a step.
class Diagnosis {
  public:
    virtual ~Diagnosis() = default;
    virtual Plan &plan() = 0;  // placed by Model::allocate(), or by a caller that only prints it
    virtual RehearsedSteps rehearse_steps(
        size_t micro_steps) = 0;  // with `micro_steps` rows each; the result refers to the model
    virtual void profile() = 0;   // measures all following steps; must be called before Model::allocate()
    virtual Trace &trace() = 0;   // observes the model's ops
    virtual Arena &arena() = 0;
    virtual Memory &memory() = 0;                       // the memory of the arena
    virtual std::string store_name() const = 0;         // the storage of offloaded arrays; empty without offloading
    virtual double model_flops(const Row &) const = 0;  // of a row in a training step: OpList::model_flops
    virtual Payload take_sent() = 0;                    // bytes that this rank has sent since the last call
};

// A loss that is a function of each token's nll alone. Called with the nll of some predictors of a row, whose numbers among the row's predictors are
// given, it returns its derivatives with respect to them.
using TokenLoss = std::function<std::vector<float>(std::span<const size_t> numbers, std::span<const float> nll)>;

// The calls of an optimizer step. All ranks make them together, and all ranks of a ring pass the same row.
class Trainee {
  public:
    virtual ~Trainee() = default;
    // Sets the key of dropout in adapters and of noise on embeddings (limits), for all following calls. Without a key both are off.
    virtual void randomise(std::optional<uint64_t> key) = 0;
    // Begins a step. Gradients in bf16 are rounded by random bits that are a function of the key, the micro-step and the parameter's number.
    virtual void zero_gradients(uint64_t key = 0) = 0;
    // Runs the backward pass of the row that Model::evaluate() was given last. weights[i] is the derivative of the loss with respect to value i, and
    // entropy_weight the derivative with respect to the entropy of each predictor's distribution. Gradients are added to earlier rows'. A row without
    // tokens means that this ring has none in this micro-step. In the `last` micro-step of a step the gradients are summed over ranks, unless that
    // was done before.
    virtual void backward(std::span<const float> weights, float entropy_weight, bool last) = 0;
    // Does both for the loss weight * sum of nll. As the weight is known beforehand, a language model's head computes its logits only once.
    virtual void accumulate(const Row &, float weight, bool last) = 0;
    // The same for a loss of tokens, which judges each chunk of the head's rows between its softmax and its gradients: on each rank of a ring those of
    // the rank's part of the row.
    virtual void accumulate(const Row &, const TokenLoss &loss, float entropy_weight, bool last) = 0;
    // Forward and backward for the loss weight * sum of divergences from the teacher, which has taught the same row.
    virtual void distil(const Row &, const TeacherRow &, float weight, bool last) = 0;
    // A forward pass of a mixture of experts that only counts which experts the row's tokens go to, for the derivatives of the auxiliary loss. All
    // rows of a step with an auxiliary loss are passed, up to the `last` one, before the first backward pass. A step of one micro-step does without.
    virtual void count_routing(const Row &, bool last) = 0;
    virtual Routing routing() = 0;  // of this rank's tokens since zero_gradients(); without experts nothing
    virtual double gradient_norm() = 0;
    virtual std::string nonfinite_gradient() = 0;  // name of the first tensor whose gradient is not finite
    virtual void update(const AdamW &) = 0;        // updates all parameters; the table says which of them decay
    // This rank's part, numbered for ranks of which this many divide tensors; 0: as these ranks do.
    virtual OptimizerState optimizer_state(size_t tensor_ranks = 0) = 0;
    virtual void optimizer_state_loaded() = 0;  // gathers the parameters that other ranks have loaded
    virtual void gather_parameters() = 0;       // waits for the parameters that update() and optimizer_state_loaded() gather
};

// A model with its weights, which evaluates rows.
class Model : public Diagnosis, public Trainee {
  public:
    std::shared_ptr<void> device_state;  // state of the device between calls; other models may share it

    virtual Generator &generator() = 0;  // requires limits with a cache
    // `mesh` is the mesh of limits.ranks and must outlive the model. guards, poison: debugging aids of arena.h
    virtual void allocate(Mesh &mesh, bool guards, bool poison) = 0;
    virtual const std::vector<Tensor> &tensors() const = 0;         // the trained tensors: all tensors, or adapters
    virtual const std::vector<Tensor> &frozen_tensors() const = 0;  // the model's own tensors if they are frozen, else none

    // Loads every tensor of the table; each rank reads its own part. The seed initialises the head of a reward model whose file has
    // a language model.
    virtual void load(const class HfWeights &, uint64_t seed) = 0;
    // Loads adapters, which load() has given initial values, and the head of a reward model from the base if the adapter's file has none.
    virtual void load_adapters(const HfWeights &adapter, const HfWeights &base, uint64_t seed) = 0;

    // All ranks make the calls below together. All ranks of a ring pass the same row.
    virtual void initialise(uint64_t seed) = 0;  // sets random weights, a function of seed and tensor name alone
    // Rank 0 writes the weights; the caller writes config and tokenizer. Either all ranks throw the same error, or none throws.
    virtual void save(const std::string &dir, const std::string &export_dtype) = 0;
    // Copies all parameters to a model of the same configuration for evaluation or generation, which no ranks share.
    virtual void copy_parameters_to(Model &) = 0;
    // Runs the forward pass. Returns a value for each predictor of the row: the nll of its target, or a score in a reward model
    // (ModelConfig::reward), so one per document for a row of at_ends(). All ranks of a ring get the same values. Adds to the sums that take_sums()
    // returns. Rings may process different numbers of rows, but with sharded weights, ranks with fewer rows pass empty rows at the end.
    virtual std::vector<double> evaluate(const Row &) = 0;
    // The same with only the base of adapters: the reference model of dpo and grpo. Does not add to the sums.
    virtual std::vector<double> evaluate_base(const Row &) = 0;
    // Runs the forward pass up to the final norm, by a teacher or by the base of a student's adapters. The result is valid until this model's next call
    // of teach(), and on a teacher no other call may come between.
    virtual TeacherRow teach(const Row &) = 0;
    // A forward pass of a student, which adds the row's divergences to the sums of take_divergence().
    virtual void compare(const Row &, const TeacherRow &) = 0;
    virtual DivergenceSums take_divergence() = 0;  // of a student in place of take_sums()
    virtual LossSums take_sums() = 0;              // sums over this rank's targets since the last call; waits for the device
};
