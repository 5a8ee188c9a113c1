// Implements the emulator's NCCL for ranks that are threads, with checks of what NCCL itself would answer with a hang or wrong numbers (streams.h).
#include <execinfo.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "../../llmc/parallel/point_to_point.h"
#include "block.h"
#include "emulated_processes.h"

namespace CUDA_BACKEND {
using namespace simt;

namespace {

struct Call {  // of a rank
    std::string name;
    size_t n;
    SliceType type;
    int root = -1;
    void *pcs[24] = {};
    int depth = 0;

    Call(const char *name, size_t n, ncclDataType_t type, int root = -1)
        : name(name), n(n), type(SliceType(type)), root(root), depth(backtrace(pcs, 24)) {}
    size_t bytes() const { return n * bytes_of(type); }
    bool agrees(const Call &o) const { return name == o.name && n == o.n && type == o.type && root == o.root; }
    std::string text() const {
        return format("%s of %zu %s%s (%s)", name.c_str(), n, name_of(type),
                      root < 0 ? "" : format(" from rank %d", root).c_str(), call_site(pcs, depth).c_str());
    }
};

struct Part {  // a rank's contribution to a collective
    Call call;
    const void *send;
    void *recv;
};

struct Collective {
    std::map<int, Part> parts;  // of the ranks that have come
    int left = 0;
};

struct Half {  // of an exchange
    Call call;
    void *data;
    int other;
    bool taken = false;  // a message that is sent: its receiver has it
};

struct Group {  // of messages, between ncclGroupStart and ncclGroupEnd
    bool is_open = false;
    std::vector<std::shared_ptr<Half>> send, receive;
    NcclRank *comm = nullptr;
    cudaStream_t stream = nullptr;
};
thread_local Group group;

struct Waiting;
struct Rank {  // a thread
    int communicators = 0;
    // Of all its communicators, because two calls at a time may wait for each other on a real GPU.
    cudaStream_t stream = nullptr;
    std::unique_ptr<Waiting> waits;  // the call at the front of the stream, if it waits
};
thread_local const auto own = std::make_shared<Rank>();

struct Member {
    std::shared_ptr<Rank> is;
    uint64_t collectives = 0, groups = 0;  // that it has called; that it has called and not completed
    bool has_ended = false;
};

struct Clique {  // the ranks of a communicator
    std::vector<Member> members;
    std::map<uint64_t, Collective> collectives = {};                                 // by number
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<Half>>> messages = {};  // by sender and receiver
};

struct Waiting {
    std::shared_ptr<Clique> clique;
    int rank;
    Call call;
    uint64_t number;                          // of the collective; 0: messages
    std::function<std::vector<int>()> lacks;  // the ranks for which it waits now
};

// Guards all of these. It is never held while work is enqueued, because work takes it within the scheduler's lock.
std::mutex lock;

// Returns the calls of a circle of ranks that wait for each other, beginning with one of the path; empty if there is none.
std::string circle(std::vector<const Rank *> path) {
    const Waiting &w = *path.back()->waits;
    for (const int rank : w.lacks()) {
        const Rank *const next = w.clique->members[size_t(rank)].is.get();
        if (!next || !next->waits) continue;
        std::string out;
        if (const auto begin = std::ranges::find(path, next); begin != path.end()) {
            for (auto r = begin; r != path.end(); r++)
                out += format("\n  rank %d of %zu is at %s", (*r)->waits->rank, (*r)->waits->clique->members.size(),
                              (*r)->waits->call.text().c_str());
            return out;
        }
        path.push_back(next);
        if (out = circle(path); !out.empty()) return out;
        path.pop_back();
    }
    return "";
}

void wait_at(const Waiting &w) {
    Rank &own = *w.clique->members[size_t(w.rank)].is;
    own.waits = std::make_unique<Waiting>(w);
    for (const int rank : w.lacks())
        if (const Member &m = w.clique->members[size_t(rank)];
            m.has_ended && (w.number ? m.collectives < w.number : m.groups == 0))
            die("rank %d waits for rank %d at %s, and that rank has ended the communicator without such a call\n  fix: every rank makes the same calls",
                w.rank, rank, w.call.text().c_str());
    if (const std::string calls = circle({&own}); !calls.empty())
        die("ranks wait for each other:%s\n  fix: every rank makes its calls in the same order", calls.c_str());
}

void expect_disjoint(int rank, const Call &call, const void *a, size_t bytes_of_a, const void *b, size_t bytes_of_b) {
    const auto x = uintptr_t(a), y = uintptr_t(b);
    if (x < y + bytes_of_b && y < x + bytes_of_a)
        die("rank %d: the slices of %s overlap\n  fix: a call in place uses the rank's own part of the larger slice", rank,
            call.text().c_str());
}

std::byte *at(const void *p, size_t bytes) { return static_cast<std::byte *>(const_cast<void *>(p)) + bytes; }

// Computes a collective for all ranks.
void compute(const std::map<int, Part> &parts) {
    const Call &call = parts.at(0).call;
    const auto senders = [&](size_t offset) {
        std::vector<const std::byte *> out;
        for (const auto &[rank, p] : parts) out.push_back(at(p.send, offset));
        return out;
    };
    const auto copy = [](void *to, const void *from, size_t bytes) {
        if (to != from && bytes) memcpy(to, from, bytes);
    };
    for (const auto &[rank, p] : parts) {
        if (call.name == "ncclReduceScatter") sum_slices(call.type, p.recv, senders(size_t(rank) * call.bytes()), call.n);
        if (call.name == "ncclAllReduce" && rank == 0) sum_slices(call.type, p.recv, senders(0), call.n);
        if (call.name == "ncclAllReduce") copy(p.recv, parts.at(0).recv, call.bytes());
        if (call.name == "ncclBroadcast") copy(p.recv, parts.at(call.root).send, call.bytes());
        if (call.name == "ncclAllGather")
            for (const auto &[sender, s] : parts) copy(at(p.recv, size_t(sender) * call.bytes()), s.send, call.bytes());
    }
}

}  // namespace

struct NcclRank {
    std::shared_ptr<Clique> clique;
    int rank;
    Member &member() const { return clique->members[size_t(rank)]; }
};

static void expect_own_stream(const NcclRank *comm, cudaStream_t stream) {
    if (stream->priority == 0)
        die("NCCL's kernels are launched on a stream of normal priority, where they wait behind the blocks of products\n"
            "  fix: CudaStream(StreamPriority::urgent)");
    Rank &own = *comm->member().is;
    if (own.stream && own.stream != stream)
        die("rank %d calls NCCL on two streams: kernels of two communicators may wait for each other\n  fix: one stream for all",
            comm->rank);
    own.stream = stream;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static std::atomic<uint64_t> last = 0;
    return *id = {++last}, ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    static std::map<uint64_t, std::weak_ptr<Clique>> cliques;
    const std::lock_guard guard(lock);
    auto clique = cliques[id.number].lock();
    if (!clique) cliques[id.number] = clique = std::make_shared<Clique>(Clique{std::vector<Member>(size_t(ranks))});
    if (clique->members.size() != size_t(ranks) || rank >= ranks || clique->members[size_t(rank)].is)
        die("rank %d of %d joins a communicator of %zu ranks\n  fix: every rank joins once, with the same number of ranks", rank,
            ranks, clique->members.size());
    clique->members[size_t(rank)].is = own;
    own->communicators++;
    return *comm = new NcclRank{clique, rank}, ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    const std::lock_guard guard(lock);
    return comm->member().has_ended = true, ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    const std::lock_guard guard(lock);
    if (Rank &own = *comm->member().is; --own.communicators == 0) own.stream = nullptr, own.waits = nullptr;
    return delete comm, ncclSuccess;
}

// The last rank to arrive computes the result for all.
static ncclResult_t collective(ncclComm_t comm, cudaStream_t stream, const Part &part) {
    const int rank = comm->rank;
    const size_t bytes = part.call.bytes(), ranks = comm->clique->members.size();
    const bool gathers = part.call.name == "ncclAllGather", scatters = part.call.name == "ncclReduceScatter";
    const std::byte *const in_place = gathers    ? at(part.recv, size_t(rank) * bytes)
                                      : scatters ? at(part.send, size_t(rank) * bytes)
                                                 : at(part.send, 0);
    if (in_place != (gathers ? part.send : part.recv))
        expect_disjoint(rank, part.call, part.send, bytes * (scatters ? ranks : 1), part.recv, bytes * (gathers ? ranks : 1));
    const uint64_t number = [&] {
        const std::lock_guard guard(lock);
        expect_own_stream(comm, stream);
        return ++comm->member().collectives;
    }();
    enqueue_until(stream, [clique = comm->clique, number, rank, part] {
        const std::lock_guard guard(lock);
        Collective &all = clique->collectives[number];
        const int ranks = int(clique->members.size());
        if (all.parts.emplace(rank, part).second) {
            for (const auto &[r, other] : all.parts)
                if (!other.call.agrees(part.call))
                    die("rank %d is at %s, and rank %d at %s\n  fix: every rank makes the same calls in the same order", rank,
                        part.call.text().c_str(), r, other.call.text().c_str());
            if (int(all.parts.size()) == ranks) compute(all.parts);
        }
        if (int(all.parts.size()) < ranks) {
            const auto lacks = [clique, number, ranks] {
                std::vector<int> out;
                const auto found = clique->collectives.find(number);
                for (int r = 0; found != clique->collectives.end() && r < ranks; r++)
                    if (!found->second.parts.contains(r)) out.push_back(r);
                return out;
            };
            return wait_at({clique, rank, part.call, number, lacks}), false;
        }
        clique->members[size_t(rank)].is->waits = nullptr;
        if (++all.left == ranks) clique->collectives.erase(number);
        return true;
    });
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t n, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective(comm, stream, {{"ncclAllReduce", n, type}, send, recv});
}
ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t n, ncclDataType_t type, ncclRedOp_t, ncclComm_t comm,
                               cudaStream_t stream) {
    return collective(comm, stream, {{"ncclReduceScatter", n, type}, send, recv});
}
ncclResult_t ncclAllGather(const void *send, void *recv, size_t n, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return collective(comm, stream, {{"ncclAllGather", n, type}, send, recv});
}
ncclResult_t ncclBroadcast(const void *send, void *recv, size_t n, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective(comm, stream, {{"ncclBroadcast", n, type, root}, send, recv});
}

ncclResult_t ncclGroupStart() {
    group = {};
    return group.is_open = true, ncclSuccess;
}

static ncclResult_t add(std::vector<std::shared_ptr<Half>> Group::*halves, const Half &half, ncclComm_t comm,
                        cudaStream_t stream) {
    Group now = std::exchange(group, {});  // a wrong call ends it
    if (!now.is_open || (now.comm && (now.comm != comm || now.stream != stream)))
        die("rank %d: %s is not in a group of its communicator\n  fix: ncclGroupStart before it and ncclGroupEnd after it",
            comm->rank, half.call.text().c_str());
    for (const auto *others : {&now.send, &now.receive})
        for (const auto &other : *others)
            if (halves == &Group::receive || others == &now.receive)
                expect_disjoint(comm->rank, half.call, half.data, half.call.bytes(), other->data, other->call.bytes());
    (now.*halves).push_back(std::make_shared<Half>(half));
    now.comm = comm, now.stream = stream;
    return group = std::move(now), ncclSuccess;
}
ncclResult_t ncclSend(const void *data, size_t n, ncclDataType_t type, int to, ncclComm_t comm, cudaStream_t stream) {
    return add(&Group::send, {{"ncclSend", n, type}, const_cast<void *>(data), to}, comm, stream);
}
ncclResult_t ncclRecv(void *data, size_t n, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t stream) {
    return add(&Group::receive, {{"ncclRecv", n, type}, data, from}, comm, stream);
}

// A group is complete when all its messages have been received, in both directions.
ncclResult_t ncclGroupEnd() {
    Group now = std::exchange(group, {});
    if (!now.comm) return ncclSuccess;
    {
        const std::lock_guard guard(lock);
        expect_own_stream(now.comm, now.stream);
        now.comm->member().groups++;
    }
    enqueue_until(now.stream, [clique = now.comm->clique, rank = now.comm->rank, now, is_posted = false]() mutable {
        const std::lock_guard guard(lock);
        if (!std::exchange(is_posted, true))
            for (const auto &h : now.send) clique->messages[{rank, h->other}].push_back(h);
        std::erase_if(now.receive, [&](const std::shared_ptr<Half> &h) {
            auto &box = clique->messages[{h->other, rank}];
            if (box.empty()) return false;
            const auto message = box.front();
            box.pop_front();
            if (message->call.n != h->call.n || message->call.type != h->call.type)
                die("rank %d is at %s to rank %d, which is at %s\n  fix: both name the same slice", h->other,
                    message->call.text().c_str(), rank, h->call.text().c_str());
            memcpy(h->data, message->data, h->call.bytes());
            return message->taken = true;
        });
        const auto lacks = [clique, rank, sent = now.send, receive = now.receive] {
            std::vector<int> out;
            std::map<int, size_t> expected;  // messages, by sender
            for (const auto &h : receive)
                if (clique->messages[{h->other, rank}].size() < ++expected[h->other]) out.push_back(h->other);
            for (const auto &h : sent)
                if (!h->taken) out.push_back(h->other);
            return out;
        };
        if (const auto left = lacks(); !left.empty()) {
            const auto &first = now.receive.empty() ? *std::ranges::find(now.send, false, &Half::taken) : now.receive.front();
            return wait_at({clique, rank, first->call, 0, lacks}), false;
        }
        clique->members[size_t(rank)].is->waits = nullptr;
        clique->members[size_t(rank)].groups--;
        return true;
    });
    return ncclSuccess;
}

std::unique_ptr<Comm> join_processes(Comm &host) {
    const auto all = host.gather(getpid());
    if (std::ranges::all_of(all, [](pid_t p) { return p == getpid(); })) return nullptr;
    return std::make_unique<EmulatedProcesses>(host);
}
}  // namespace CUDA_BACKEND
