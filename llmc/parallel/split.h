// Divides a packed row among the ranks of a ring, by pure functions of the row's documents, so every rank computes the same division.
//
// The row is cut into 8 equal pieces per rank, and each rank gets 8 of them. All ranks thus have the same number of tokens, which balances
// all work except attention. The work of attention is its number of (query, key) scores, which depends on document borders and windows.
// There are three ways to deal the pieces; the one with the smallest estimated time is used:
//
//   contiguous      rank r has pieces 8r .. 8r+7: sends the fewest bytes, and is balanced if documents are short
//   zigzag          of 2*sp groups of 4 pieces, rank r has numbers r and 2*sp-1-r: is balanced for one long document
//   longest_first   the piece with the most work goes to the rank with the least work so far; ties go to a rank that holds a neighbouring piece
//                   (Graham, "Bounds on multiprocessing timing anomalies", 1969, with equal counts)
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "../data/row.h"
#include "../ops/attention_types.h"

constexpr size_t pieces_per_rank = 8;

enum class SpMode { ring, gather, ulysses };  // the exchange of keys and values between ranks (ring.h)

// Dies, with the same message on each rank, if the numbers of heads do not suit the mode.
void check_sp_mode(SpMode mode, size_t ranks, size_t H, size_t KV, size_t head_stride);

// The heads of a rank under ulysses. Its query heads begin at h * rank; each run of `shared` of them uses one KV head.
struct UlyssesHeads {
    size_t h, group, shared, m;
    UlyssesHeads(size_t ranks, size_t H, size_t KV) : h(H / ranks), group(H / KV), shared(std::gcd(h, group)), m(h / shared) {}
    size_t kv_head(size_t rank, size_t i) const { return (rank * h + i * shared) / group; }  // i < m
};

// A group of layers with the same window, which share one array `first_key` (attention.h). A query sees at most the last `window` keys of
// its document (0: all).
struct LayerKind {
    size_t window, layers;
};

// The cost of a model's attention, and the speed of a rank. The rates are constants of a device and a kind of communicator. They are never
// measured, to keep runs reproducible.
struct AttentionCost {
    size_t H, KV, D, element;  // element: bytes of an element of K and V
    double flops, bandwidth;   // per second, of one rank; bytes per second of a link, in each direction. Both may be infinite

    double forward(double scores) const { return scores * attention_flops * double(H * D) / flops; }
    double backward(double scores) const { return scores * attention_backward_flops * double(H * D) / flops; }
    double kv(double rows) const { return rows * 2.0 * double(KV * D * element) / bandwidth; }
    double dkv(double rows) const { return rows * 2.0 * double(KV * D * sizeof(float)) / bandwidth; }
};

// Returns the number of scores of each pair of pieces of `size` positions: [i * pieces + j] counts the keys of piece j that each query of
// piece i sees, summed over these queries.
std::vector<uint64_t> scores_of_pieces(const Row &row, size_t size, size_t window);
// Returns their sum, with or without those of the padding.
double scores_of_row(const Row &row, size_t window, bool padding);

// The travel of K and V for one kind of layer. The KV block of rank s hops to s+1, s+2, ... (mod ranks). A piece of it only travels to the last rank
// that needs it. The rows of a block are sorted by decreasing number of hops, so the rows that make hop h are the first ones.
class KeyTravel {
  public:
    struct Stop {
        Piece piece;    // its positions, and its local row on the rank that owns it
        size_t packed;  // its first row in the block
        size_t hops;    // number of hops; 0: only its owner needs it
    };

    KeyTravel(std::span<const uint64_t> scores, std::span<const size_t> owner, size_t ranks, size_t size);

    size_t max_hops() const { return max_hops_; }  // the most hops of any block
    size_t rows(size_t source, size_t hop) const;  // rows of a source's block that make hop number `hop`, counted from 1
    Pieces keys(size_t source, size_t hop) const;  // the same rows, as pieces of the block
    bool sees(size_t rank, size_t source) const { return scores_[rank * blocks_.size() + source] > 0; }
    size_t last_hop(size_t rank) const;  // whose keys the rank sees
    uint64_t scores(size_t rank, size_t source) const { return scores_[rank * blocks_.size() + source]; }
    const std::vector<Stop> &block(size_t source) const {
        return blocks_[source];
    }                         // its pieces in the order in which they are packed
    size_t row_hops() const;  // the hops of all rows together; times 2 * KV * D * element, the bytes of K and V

  private:
    std::vector<std::vector<Stop>> blocks_;
    std::vector<uint64_t> scores_;  // (ranks, ranks)
    size_t max_hops_ = 0;
};

enum class Layout { contiguous, zigzag, longest_first };
constexpr std::array<Layout, 3> layouts = {Layout::contiguous, Layout::zigzag, Layout::longest_first};
const char *name_of(Layout layout);

struct SequenceSplit {
    Layout layout;
    size_t T, ranks;
    std::vector<Pieces> pieces;     // (ranks) the pieces of each rank, neighbours merged
    std::vector<KeyTravel> travel;  // (kinds of layers)
    std::vector<double> work;       // (ranks) scores of all layers
    double seconds = 0;             // estimated time, forward and backward of all layers

    size_t local_T() const { return T / ranks; }
    double balance() const;                            // mean of the work over its maximum; 1 is ideal
    std::vector<size_t> positions(size_t rank) const;  // (local_T) the global position of each local row
};

// A border of two ranks' pieces within a document, for layers that pass states on (delta_ring.h).
struct PieceBorder {
    size_t from, to, from_piece, to_piece;  // the ranks, and the numbers of their pieces
    bool from_continues, to_continues;      // true if the document fills that piece: it also crosses the border at the other end
};
// Returns the borders in the order of the row.
std::vector<PieceBorder> piece_borders(const SequenceSplit &split, std::span<const size_t> doc_offsets);

// row.T must be a multiple of pieces_per_rank * ranks (pad_row). The pieces are dealt by the work of the layers `dealt_by`; empty: of `kinds`.
SequenceSplit split_sequence(Layout layout, const Row &row, size_t ranks, std::span<const LayerKind> kinds,
                             const AttentionCost &cost, std::span<const LayerKind> dealt_by = {});

// Returns the layout with the smallest `seconds`, among those of at most `most_pieces` pieces a rank; the first one wins ties. Ulysses (ring.h) always
// uses contiguous.
SequenceSplit choose_split(const Row &row, size_t ranks, std::span<const LayerKind> kinds, const AttentionCost &cost,
                           size_t most_pieces = pieces_per_rank);

// Returns the slowest rank's time for attention. A step of the ring takes as long as the longer of its computation and its transfer.
double estimate_seconds(const KeyTravel &travel, size_t ranks, const AttentionCost &cost);

// Deals rows to dp groups: result[group][micro-step] is an index into `costs`, or no_row. A micro-step ends for all groups at the same time,
// so rows of similar cost share one: rows are sorted by decreasing cost, each micro-step takes the next `groups` rows, and the longest goes
// to the group with the least work so far. Every group has the same number of micro-steps and takes part in each, even without a row.
constexpr size_t no_row = size_t(-1);
std::vector<std::vector<size_t>> deal_rows(std::span<const double> costs, size_t groups);

// The parts of attention to shared prompts (../ops/attention_prompts.h), and PromptParts::first_key, which the caller puts on the device.
struct PromptSplit {
    std::vector<PromptPart> parts;
    std::vector<int32_t> first_key;
};
PromptSplit split_prompts(const Row &row, size_t window);

// Returns the floating-point operations of a row, forward and backward, for deal_rows: attention's from its scores, all others from tokens.
double row_cost(const Row &row, std::span<const LayerKind> kinds, size_t H, size_t D, double flops_per_token);
