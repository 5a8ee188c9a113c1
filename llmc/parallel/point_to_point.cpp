#include "point_to_point.h"

#include <algorithm>

static const SliceMemory host_memory;
static constexpr size_t scratch_bytes = size_t(4) << 20;  // memory limit for parts that are summed at a time

// Computes out = the sum of parts[0], parts[1], ..., in that order and in the type Sum. out may be one of the parts.
template <class T, class Sum> static void sum_in_order(T *out, const std::vector<const T *> &parts, size_t n) {
    constexpr size_t block = 1024;
    Sum sum[block];
    for (size_t first = 0; first < n; first += block) {
        const size_t m = std::min(block, n - first);
        for (size_t i = 0; i < m; i++) sum[i] = Sum(parts[0][first + i]);
        for (size_t r = 1; r < parts.size(); r++)
            for (size_t i = 0; i < m; i++) sum[i] = Sum(sum[i] + Sum(parts[r][first + i]));
        for (size_t i = 0; i < m; i++) out[first + i] = T(sum[i]);
    }
}

template <class T, class Sum = T> static void sum_as(void *out, const std::vector<const std::byte *> &parts, size_t n) {
    std::vector<const T *> typed;
    for (const std::byte *p : parts) typed.push_back(reinterpret_cast<const T *>(p));
    sum_in_order<T, Sum>(static_cast<T *>(out), typed, n);
}

void sum_slices(SliceType type, void *out, const std::vector<const std::byte *> &parts, size_t n) {
    switch (type) {
        case SliceType::f32: return sum_as<float>(out, parts, n);
        case SliceType::f64: return sum_as<double>(out, parts, n);
        case SliceType::bf16: return sum_as<bf16, float>(out, parts, n);
        case SliceType::i32: return sum_as<int32_t>(out, parts, n);
        case SliceType::i64: return sum_as<int64_t>(out, parts, n);
        case SliceType::u8: return sum_as<uint8_t>(out, parts, n);
    }
}

// ---- from the transport ---------------------------------------------------------------------------------------------------------------

Request PointToPointComm::post(Slice send, int to, Slice recv, int from, const SliceMemory &memory) {
    if (!send.count && !recv.count) return {};
    return {this, transport_.post(tag_, send.data, send.bytes(), send.count ? members_[size_t(to)] : -1, recv.data, recv.bytes(),
                                  recv.count ? members_[size_t(from)] : -1, memory)};
}

Request PointToPointComm::do_exchange(Slice send, int to, Slice recv, int from) {
    memory.finish();
    return post(send, to, recv, from, memory);
}

// Sends send_to(r) to every other rank r and receives receive_from(r), all at once.
void PointToPointComm::with_each(const std::function<Slice(size_t)> &send_to, const std::function<Slice(size_t)> &receive_from,
                                 const SliceMemory &memory) {
    std::vector<Request> requests;
    for (int step = 1; step < size; step++) {
        const int to = (rank + step) % size, from = (rank - step + size) % size;
        requests.push_back(post(send_to(size_t(to)), to, receive_from(size_t(from)), from, memory));
    }
    for (Request &request : requests) complete(request);
}

void PointToPointComm::gather_host(const void *own, size_t bytes, void *all) {
    const Slice mine(static_cast<const uint8_t *>(own), bytes), every(static_cast<uint8_t *>(all), bytes * size_t(size));
    memcpy(every.part(size_t(rank) * bytes, bytes).data, own, bytes);
    with_each([&](size_t) { return mine; }, [&](size_t r) { return every.part(r * bytes, bytes); }, host_memory);
}

// ---- slices ---------------------------------------------------------------------------------------------------------------------------

// Computes out = the sum over ranks of elements [begin[rank], begin[rank + 1]) of data, a piece at a time, in host memory.
void PointToPointComm::reduce_parts(Slice data, const std::vector<size_t> &begin, Slice out) {
    const size_t ranks = size_t(size), own = size_t(rank), element = bytes_of(data.type);
    size_t longest = 0;
    for (size_t r = 0; r < ranks; r++) longest = std::max(longest, begin[r + 1] - begin[r]);
    const size_t piece = std::min(longest, std::max<size_t>(1, scratch_bytes / element / ranks));
    std::vector<std::byte> scratch(ranks * piece * element);
    memory.finish();
    for (size_t first = 0; first < longest; first += piece) {
        auto in_piece = [&](size_t r) {  // the piece within rank r's part
            return std::min(piece, begin[r + 1] - std::min(begin[r + 1], begin[r] + first));
        };
        const size_t n = in_piece(own);
        auto from = [&](size_t r) {
            Slice s = data;
            s.data = scratch.data() + r * piece * element, s.count = n;
            return s;
        };
        with_each([&](size_t r) { return data.part(begin[r] + first, in_piece(r)); }, from, memory);
        if (n == 0) continue;
        memory.copy(from(own).data, data.part(begin[own] + first, n).data, n * element);
        std::vector<const std::byte *> parts;
        for (size_t r = 0; r < ranks; r++) parts.push_back(static_cast<const std::byte *>(from(r).data));
        sum_slices(data.type, scratch.data(), parts, n);
        memory.copy(out.part(first, n).data, scratch.data(), n * element);
    }
}

void PointToPointComm::do_reduce_scatter_sum(Slice send, Slice recv) {
    std::vector<size_t> begin;
    for (size_t r = 0; r <= size_t(size); r++) begin.push_back(r * recv.count);
    reduce_parts(send, begin, recv);
}

// Each rank sums its part and sends it to all.
void PointToPointComm::do_all_reduce_sum(Slice data) {
    const size_t own = size_t(rank), part = ceil_div(data.count, size_t(size));
    std::vector<size_t> begin;
    for (size_t r = 0; r <= size_t(size); r++) begin.push_back(std::min(r * part, data.count));
    auto of = [&](size_t r) { return data.part(begin[r], begin[r + 1] - begin[r]); };
    reduce_parts(data, begin, of(own));
    with_each([&](size_t) { return of(own); }, of, memory);
}

void PointToPointComm::do_all_gather(Slice send, Slice recv) {
    const Slice own = recv.part(size_t(rank) * send.count, send.count);
    memory.finish();
    if (own.data != send.data) memory.copy(own.data, send.data, send.bytes());
    with_each([&](size_t) { return send; }, [&](size_t r) { return recv.part(r * send.count, send.count); }, memory);
}

void PointToPointComm::do_all_to_all(Slice send, Slice recv) {
    const size_t n = send.count / size_t(size), own = size_t(rank) * n;
    memory.finish();
    memory.copy(recv.part(own, n).data, send.part(own, n).data, send.part(own, n).bytes());
    with_each([&](size_t r) { return send.part(r * n, n); }, [&](size_t r) { return recv.part(r * n, n); }, memory);
}

void PointToPointComm::do_broadcast(Slice data, int root) {
    memory.finish();
    with_each([&](size_t) { return rank == root ? data : Slice(); }, [&](size_t r) { return int(r) == root ? data : Slice(); },
              memory);
}

// ---- communicators --------------------------------------------------------------------------------------------------------------------

std::unique_ptr<Comm> PointToPointComm::do_split(int color, int key) {
    const Part part = part_of(color, key, transport_.next_tag);
    std::vector<int> members;
    for (int r : part.ranks) members.push_back(members_[size_t(r)]);
    return std::make_unique<PointToPointComm>(transport_, members, part.rank, part.tag);
}

// ---- the watchdog's words -------------------------------------------------------------------------------------------------------------

std::string describe_rank(const Stamp &last, bool waits) {
    const std::string call = last.text();
    return call.empty() ? "no call yet" : (waits ? "in " : "back from ") + call;
}

std::string hung_message(int rank, double timeout, const std::vector<std::string> &ranks) {
    std::string text = format("rank %d has waited longer than --comm_timeout %g; the last call of each rank:", rank, timeout);
    for (size_t r = 0; r < ranks.size(); r++)
        text += format("\n  rank %zu: %s", r, ranks[r].empty() ? "no answer" : ranks[r].c_str());
    return text + "\n  fix: raise --comm_timeout if a rank is only slow; --debug compares the ranks' calls";
}
