#include "comm.h"

#include <algorithm>
#include <chrono>
#include <exception>

#include "../core/signals.h"

size_t bytes_of(SliceType type) {
    switch (type) {
        case SliceType::f64:
        case SliceType::i64: return 8;
        case SliceType::f32:
        case SliceType::i32: return 4;
        case SliceType::bf16: return 2;
        case SliceType::u8: return 1;
    }
    die("no such type of slice: %d", int(type));
}

const char *name_of(SliceType type) {
    static const char *const names[] = {"f32", "f64", "bf16", "i32", "i64", "u8"};
    return names[size_t(type)];
}

Slice Slice::part(size_t first, size_t n) const {
    Slice out = *this;
    out.data = static_cast<std::byte *>(data) + first * bytes_of(type);
    out.count = n;
    return out;
}

Request::~Request() {
    if (comm) comm->withdraw(id);
}

// ---- stamps ---------------------------------------------------------------------------------------------------------------------------

static Stamp stamp_of(const char *call, Slice slice = {}, int to = -1, Slice received = {}, int from = -1) {
    Stamp s;
    snprintf(s.call, sizeof(s.call), "%s", call);
    s.count = slice.count, s.received = received.count;
    s.type = slice.count ? slice.type : received.type;
    s.to = to, s.from = from;
    return s;
}

std::string Stamp::text() const {
    std::string what = call;
    if (!strcmp(call, "exchange"))
        what += format("(%zu %s to %d, %zu from %d)", size_t(count), name_of(type), to, size_t(received), from);
    else if (count) what += format("(%zu %s%s)", size_t(count), name_of(type), to < 0 ? "" : format(" from %d", to).c_str());
    return line ? what + format(" %s:%u", file, line) : what;
}

// True if two ranks make the same call. The slices of an exchange are not compared here, because they match other ranks' slices.
static bool same_call(const Stamp &a, const Stamp &b) {
    Stamp c = b;
    if (!strcmp(a.call, "exchange")) c.type = a.type, c.count = a.count, c.received = a.received, c.to = a.to, c.from = a.from;
    return a == c;
}

static std::string mismatch(const std::vector<Stamp> &stamps) {
    auto between = [&](size_t a, size_t b) {
        return format("rank %zu is at %s while rank %zu is at %s", a, stamps[a].text().c_str(), b, stamps[b].text().c_str());
    };
    for (size_t r = 1; r < stamps.size(); r++)
        if (!same_call(stamps[0], stamps[r])) return between(r, 0);
    if (strcmp(stamps[0].call, "exchange")) return "";
    for (size_t r = 0; r < stamps.size(); r++) {
        const Stamp &s = stamps[r];
        if (s.count && (stamps[s.to].received != s.count || stamps[s.to].from != int(r) || stamps[s.to].type != s.type))
            return between(r, size_t(s.to));
        if (s.received && (!stamps[s.from].count || stamps[s.from].to != int(r))) return between(r, size_t(s.from));
    }
    return "";
}

void Comm::stamp(Stamp stamp, const Where &at) {
    const std::string_view file = at.file_name();
    const size_t n = std::min(file.size(), sizeof(stamp.file) - 1);
    memcpy(stamp.file, file.data() + file.size() - n, n);
    stamp.line = at.line();
    enter(stamp);
    if (!check) return;
    std::vector<Stamp> stamps(static_cast<size_t>(size));
    gather_host(&stamp, sizeof(stamp), stamps.data());
    if (const std::string text = mismatch(stamps); !text.empty()) throw AgreedError(text, size);
}

// ---- slices ---------------------------------------------------------------------------------------------------------------------------

static void require(bool good, const char *rule, const Stamp &stamp, const Where &at) {
    if (!good) die("%s at %s:%u: %s", stamp.text().c_str(), at.file_name(), unsigned(at.line()), rule);
}

// Adds its own lifetime to `seconds` when it is destroyed.
class Stopwatch {
  public:
    explicit Stopwatch(double &seconds) : seconds_(seconds) {}
    ~Stopwatch() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

  private:
    double &seconds_;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void Comm::all_reduce_sum(Slice data, Where at) {
    const Stopwatch watch(seconds);
    stamp(stamp_of("all_reduce_sum", data), at);
    if (data.count) do_all_reduce_sum(data);
}

void Comm::reduce_scatter_sum(Slice send, Slice recv, Where at) {
    const Stopwatch watch(seconds);
    const Stamp s = stamp_of("reduce_scatter_sum", send);
    require(send.count == recv.count * size_t(size), "send holds as many elements as all ranks receive", s, at);
    require(!send.count || send.type == recv.type, "both slices have one type", s, at);
    stamp(s, at);
    if (send.count) do_reduce_scatter_sum(send, recv);
}

void Comm::all_gather(Slice send, Slice recv, Where at) {
    const Stopwatch watch(seconds);
    const Stamp s = stamp_of("all_gather", send);
    require(recv.count == send.count * size_t(size), "recv holds what all ranks send", s, at);
    require(!send.count || send.type == recv.type, "both slices have one type", s, at);
    stamp(s, at);
    if (send.count) do_all_gather(send, recv);
}

void Comm::all_to_all(Slice send, Slice recv, Where at) {
    const Stopwatch watch(seconds);
    const Stamp s = stamp_of("all_to_all", send);
    require(send.count == recv.count && send.count % size_t(size) == 0, "both slices have one block of equal size per rank", s,
            at);
    require(!send.count || send.type == recv.type, "both slices have one type", s, at);
    stamp(s, at);
    if (send.count) do_all_to_all(send, recv);
}

void Comm::broadcast(Slice data, int root, Where at) {
    const Stopwatch watch(seconds);
    const Stamp s = stamp_of("broadcast", data, root);
    require(root >= 0 && root < size, "the root is one of the ranks", s, at);
    stamp(s, at);
    if (data.count) do_broadcast(data, root);
}

Request Comm::exchange(Slice send, int to, Slice recv, int from, Where at) {
    const Stopwatch watch(seconds);
    const Stamp s = stamp_of("exchange", send, to, recv, from);
    require(!send.count || (to >= 0 && to < size), "`to` is one of the ranks", s, at);
    require(!recv.count || (from >= 0 && from < size), "`from` is one of the ranks", s, at);
    require(!send.count || !recv.count || send.type == recv.type, "both slices have one type", s, at);
    stamp(s, at);
    return do_exchange(send, to, recv, from);
}

void Comm::exchange_all(const std::vector<Slice> &send, const std::vector<Slice> &recv, Where at) {
    const Stopwatch watch(seconds);
    Stamp s = stamp_of("exchange_all");
    s.count = send.size();
    require(send.size() == recv.size() && send.size() % size_t(size) == 0,
            "the number of slices is the same for each rank, sent and received", s, at);
    stamp(s, at);
    do_exchange_all(send, recv);
}

// Starts all messages before it waits for any.
void Comm::do_exchange_all(const std::vector<Slice> &send, const std::vector<Slice> &recv) {
    const size_t ranks = size_t(size), own = size_t(rank), n = send.size() / ranks;
    std::vector<Request> requests;
    for (size_t hop = 1; hop < ranks; hop++) {
        const size_t to = (own + hop) % ranks, from = (own + ranks - hop) % ranks;
        for (size_t i = 0; i < n; i++) requests.push_back(do_exchange(send[to * n + i], int(to), recv[from * n + i], int(from)));
    }
    for (size_t i = own * n; i < (own + 1) * n; i++)
        if (send[i].count) memory.copy(recv[i].data, send[i].data, send[i].bytes());
    for (Request &request : requests) complete(request);
}

void Comm::wait(Request request, Where at) {
    if (!request.comm) return;
    const Stopwatch watch(seconds);
    if (request.comm != this) die("wait at %s:%u: the request is another communicator's", at.file_name(), unsigned(at.line()));
    Stamp s = stamp_of("wait");
    snprintf(s.file, sizeof(s.file), "%s", at.file_name());
    s.line = at.line();
    enter(s);
    complete(request);
}

void Comm::complete(Request &request) {
    if (request.comm) do_wait(request.id);
    request.comm = nullptr;
}

// ---- communicators and agreement ------------------------------------------------------------------------------------------------------

std::unique_ptr<Comm> Comm::split(int color, int key, Where at) {
    stamp(stamp_of("split"), at);
    auto out = do_split(color, key);
    out->memory = memory;
    out->check = check;
    return out;
}

Comm::Part Comm::part_of(int color, int key, int &next_tag) {
    struct Choice {
        int color, key, tag;
    };
    const Choice own{color, key, next_tag};
    std::vector<Choice> all(static_cast<size_t>(size));
    gather_host(&own, sizeof(own), all.data());
    Part part{{}, 0, 0};
    for (int r = 0; r < size; r++) {
        part.tag = std::max(part.tag, all[size_t(r)].tag);
        if (all[size_t(r)].color == color) part.ranks.push_back(r);
    }
    next_tag = part.tag + 1;
    std::ranges::stable_sort(part.ranks, {}, [&](int r) { return all[size_t(r)].key; });
    part.rank = int(std::ranges::find(part.ranks, rank) - part.ranks.begin());
    return part;
}

void Comm::gather_bytes(const char *call, const void *own, size_t bytes, void *all, const Where &at) {
    stamp(stamp_of(call), at);
    gather_host(own, bytes, all);
}

template <class T> std::vector<T> Comm::gathered(const char *call, T value, const Where &at) {
    std::vector<T> all(static_cast<size_t>(size));
    gather_bytes(call, &value, sizeof(T), all.data(), at);
    return all;
}

void Comm::barrier(Where at) { gathered<uint8_t>("barrier", 0, at); }

double Comm::sum(double value, Where at) {
    double out = 0;
    for (double v : gathered("sum(double)", value, at)) out += v;
    return out;
}

int64_t Comm::sum(int64_t value, Where at) {
    int64_t out = 0;
    for (int64_t v : gathered("sum(int64_t)", value, at)) out += v;
    return out;
}

template <class T> std::vector<T> Comm::summed(const char *call, const std::vector<T> &values, const Where &at) {
    const size_t n = values.size();
    Stamp s = stamp_of(call);
    s.count = n;
    stamp(s, at);
    std::vector<T> all(n * size_t(size)), out(n);
    if (n) gather_host(values.data(), n * sizeof(T), all.data());
    for (size_t i = 0; i < all.size(); i++) out[i % n] += all[i];
    return out;
}

std::vector<double> Comm::sum(const std::vector<double> &values, Where at) { return summed("sum(doubles)", values, at); }
std::vector<int64_t> Comm::sum(const std::vector<int64_t> &values, Where at) { return summed("sum(int64_t list)", values, at); }

double Comm::max(double value, Where at) {
    const auto all = gathered("max", value, at);
    return *std::max_element(all.begin(), all.end());
}

bool Comm::all(bool value, Where at) {
    const auto all = gathered("all", uint8_t(value), at);
    return std::count(all.begin(), all.end(), 0) == 0;
}

std::vector<std::string> Comm::gather(const std::string &text, Where at) {
    const auto lengths = gathered("gather", text.size(), at);
    const size_t longest = *std::max_element(lengths.begin(), lengths.end());
    std::string own = text, all(longest * size_t(size), '\0');
    own.resize(longest);
    if (longest) gather_host(own.data(), longest, all.data());
    std::vector<std::string> out;
    for (size_t r = 0; r < size_t(size); r++) out.push_back(all.substr(r * longest, lengths[r]));
    return out;
}

void agree(Comm &comm, const std::function<void()> &f, Where at) {
    std::string own;
    bool good = true;
    int signal = 0;
    try {
        f();
    } catch (const Stopped &stopped) {
        signal = stopped.signal;
        good = false;
    } catch (const std::exception &error) {
        own = message_of(error);
        good = false;
    }
    if (comm.all(good, at)) return;
    signal = int(comm.max(signal, at));
    if (signal) throw Stopped(signal);
    const auto texts = comm.gather(good ? "" : own + "\n", at);  // the line end makes even an empty message count
    std::vector<size_t> first;                                   // the first rank with each distinct message
    bool everywhere = true;
    for (size_t r = 0; r < texts.size(); r++) {
        everywhere = everywhere && texts[r] == texts[0];
        if (!texts[r].empty() && std::none_of(first.begin(), first.end(), [&](size_t s) { return texts[s] == texts[r]; }))
            first.push_back(r);
    }
    std::string message;
    for (size_t r : first) message += (everywhere ? "" : format("rank %zu: ", r)) + texts[r];
    message.pop_back();
    throw AgreedError(message, comm.size);
}
