// Where a packed row is cut for the ranks of a ring: pure functions of the row's document offsets, so that every rank computes the same.
//
// The row is cut into 8 equal pieces per rank, and each rank gets 8 of them: the same number of tokens, so that all but attention is
// balanced by itself. Attention's work is pairs of a query and a key it sees; document borders and windows decide where they are. Of
// three ways to deal the pieces that with the smallest estimated time is taken:
//
//   contiguous      rank r has pieces 8r .. 8r+7: the fewest bytes, and balanced where documents are short
//   zigzag          of 2*sp pieces of 4, rank r has number r and number 2*sp-1-r: balanced for one long document
//   longest_first   the piece with most work to the rank with least so far; of equal ranks to one that holds a neighbour of the piece
//                   (Graham, "Bounds on multiprocessing timing anomalies", 1969, with equal counts)
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../data/dataloader.h"
#include "../ops/pieces.h"

constexpr size_t pieces_per_rank = 8;

enum class SpMode { ring, gather, ulysses };  // how keys and values reach the ranks: ring.h

// Dies with the way out if the heads do not suit the mode. Each rank says the same.
void check_sp_mode(SpMode mode, size_t ranks, size_t H, size_t KV, size_t head_stride);

// Layers that share one `lo` (attention.h): a query sees the keys of its document, at most `window` of them (0: all).
struct LayerKind {
    size_t window, layers;
};

// What attention of a model costs, and how fast a rank is. Rates are constants of a device and a kind of comm, never measured: runs stay
// reproducible.
struct AttentionCost {
    size_t H, KV, D, element;  // bytes of an element of K and V
    double flops, bandwidth;   // per second: of one rank, and bytes of one link in each direction; may be infinite

    double forward(double pairs) const { return pairs * 4.0 * double(H * D) / flops; }    // q.k and p.v
    double backward(double pairs) const { return pairs * 10.0 * double(H * D) / flops; }  // five products in place of two
    double kv(double rows) const { return rows * 2.0 * double(KV * D * element) / bandwidth; }
    double dkv(double rows) const { return rows * 2.0 * double(KV * D * sizeof(float)) / bandwidth; }
};

// How many keys the queries of piece i see in piece j, for pieces of `size` positions: pairs[i * pieces + j].
std::vector<uint64_t> attention_pairs(std::span<const size_t> doc_offsets, size_t T, size_t size, size_t window);

// How K and V of one kind of layer travel. The block of rank s hops to s+1, s+2, ... (mod ranks). A piece of it travels on only to the
// last rank that needs it, so the rows of a block lie in order of falling reach, and what makes hop h is its first rows.
class KeyTravel {
  public:
    struct Stop {
        Piece piece;    // positions, and the local row at home
        size_t packed;  // the row in the block
        size_t reach;   // hops; 0: nobody but its owner needs it
    };

    KeyTravel(std::span<const uint64_t> pairs, std::span<const size_t> owner, size_t ranks, size_t size);

    size_t hops() const { return hops_; }          // the most that any block makes
    size_t rows(size_t source, size_t hop) const;  // that make hop number `hop`, from 1
    Pieces keys(size_t source, size_t hop) const;  // the same as pieces of the block
    bool sees(size_t rank, size_t source) const { return pairs_[rank * blocks_.size() + source] > 0; }
    uint64_t pairs(size_t rank, size_t source) const { return pairs_[rank * blocks_.size() + source]; }
    const std::vector<Stop> &block(size_t source) const { return blocks_[source]; }  // in the order of packing
    size_t row_hops() const;  // sum over rows of the hops they make: bytes of K and V over 2 * KV * D * element

  private:
    std::vector<std::vector<Stop>> blocks_;
    std::vector<uint64_t> pairs_;  // (ranks, ranks)
    size_t hops_ = 0;
};

enum class Layout { contiguous, zigzag, longest_first };
constexpr std::array<Layout, 3> layouts = {Layout::contiguous, Layout::zigzag, Layout::longest_first};
const char *name_of(Layout layout);

struct SequenceSplit {
    Layout layout;
    size_t T, ranks;
    std::vector<Pieces> pieces;     // (ranks) what each holds, neighbours merged
    std::vector<KeyTravel> travel;  // (kinds of layers)
    std::vector<double> work;       // (ranks) pairs of query and key, over all layers
    double seconds = 0;             // estimated, forward and backward of all layers

    size_t local_T() const { return T / ranks; }
    double balance() const;                            // mean over max of the work: 1 is ideal
    std::vector<size_t> positions(size_t rank) const;  // (local_T) the global position of each local row
};

// T must be a multiple of pieces_per_rank * ranks (pad_row).
SequenceSplit split_sequence(Layout layout, std::span<const size_t> doc_offsets, size_t T, size_t ranks,
                             std::span<const LayerKind> kinds, const AttentionCost &cost);

// The one of the three with the smallest `seconds`; of equal ones the first. Ulysses (ring.h) takes contiguous always.
SequenceSplit choose_split(std::span<const size_t> doc_offsets, size_t T, size_t ranks, std::span<const LayerKind> kinds,
                           const AttentionCost &cost);

// The slowest rank's time for attention: of each step of the ring the longer of computing and of what travels meanwhile.
double estimate_seconds(const KeyTravel &travel, size_t ranks, const AttentionCost &cost);

// The row with its padding extended, so that every one of `ranks` ranks gets a multiple of row_multiple. One rank: the row as it is.
Row pad_row(Row row, size_t ranks);

// What one rank holds of a padded row: its tokens and their positions in documents, and the targets of the predictors that it holds.
// Targets are those of the whole row: that of a piece's last token may lie on another rank. T, `rows` and the order of tokens are
// local; doc_begin, doc_offsets and documents stay those of the whole row, which attention needs.
Row local_row(const Row &row, const SequenceSplit &split, size_t rank);

// Which rows each dp group takes, one after the other: result[group][micro-step] indexes `costs`, or is no_row. A micro-step ends for all
// groups together, so rows of similar cost share one: in falling order of cost they are taken by as many as there are groups, the
// longest to the group with the least so far. Every group has the same number of micro-steps, and without a row takes part in it.
constexpr size_t no_row = size_t(-1);
std::vector<std::vector<size_t>> deal_rows(std::span<const double> costs, size_t groups);

// Floating-point operations of a row, forward and backward, for deal_rows: attention by pairs, the rest by tokens.
double row_cost(const Row &row, std::span<const LayerKind> kinds, size_t H, size_t D, double flops_per_token);
