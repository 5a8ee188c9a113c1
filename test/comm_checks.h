// Checks for every communicator. test_comm.cpp runs them on threads, processes/test_processes.cpp on processes. Each rank can compute the data
// of all ranks, and compares what it receives bit for bit.
#pragma once
#include <sys/resource.h>

#include <chrono>
#include <thread>

#include "../llmc/parallel/comm.h"
#include "check.h"
#include "errors.h"

namespace comm_checks {

template <class T> std::vector<T> values(int rank, size_t count) {
    std::vector<T> out(count);
    for (size_t i = 0; i < count; i++) {
        uint32_t h = uint32_t(i) * 0x9e3779b1u ^ (uint32_t(rank) + 1) * 0x85ebca6bu;
        h = (h ^ h >> 15) * 0xc2b2ae35u;
        if constexpr (std::is_integral_v<T>) out[i] = T(h >> 4);
        else out[i] = T(float(int32_t(h)) * 0x1p-31f * (i % 3 ? 1.0f : 1e4f));  // the order of a sum changes its bits
    }
    return out;
}

// (count) the sum in rank order; bf16 is summed in float.
template <class T> std::vector<T> sum_of_all(int ranks, size_t count) {
    using Sum = std::conditional_t<std::is_same_v<T, bf16>, float, T>;
    std::vector<Sum> sum(count);
    for (int r = 0; r < ranks; r++) {
        const auto v = values<T>(r, count);
        for (size_t i = 0; i < count; i++) sum[i] = r == 0 ? Sum(v[i]) : Sum(sum[i] + Sum(v[i]));
    }
    return std::vector<T>(sum.begin(), sum.end());
}

template <class T> void expect_bits(const char *what, const T *got, const T *want, size_t count) {
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) wrong += memcmp(&got[i], &want[i], sizeof(T)) != 0;
    EXPECT_EQ(wrong, 0u) << what << " of " << count << " " << name_of(slice_type<T>);
}

template <class T> std::vector<T> part(const std::vector<T> &v, size_t index, size_t count) {
    return std::vector<T>(v.begin() + ptrdiff_t(index * count), v.begin() + ptrdiff_t((index + 1) * count));
}

template <class T> void sums(Comm &c, size_t count) {
    auto data = values<T>(c.rank, count);
    c.all_reduce_sum({data.data(), count});
    expect_bits("all_reduce_sum", data.data(), sum_of_all<T>(c.size, count).data(), count);

    const size_t ranks = size_t(c.size), own = size_t(c.rank) * count;
    const auto want = sum_of_all<T>(c.size, ranks * count);
    auto send = values<T>(c.rank, ranks * count);
    std::vector<T> recv(count);
    c.reduce_scatter_sum({send.data(), ranks * count}, {recv.data(), count});
    expect_bits("reduce_scatter_sum", recv.data(), want.data() + own, count);
    c.reduce_scatter_sum({send.data(), ranks * count}, {send.data() + own, count});
    expect_bits("reduce_scatter_sum in place", send.data() + own, want.data() + own, count);
}

template <class T> void moves(Comm &c, size_t count) {
    const size_t ranks = size_t(c.size);
    const auto mine = values<T>(c.rank, count), blocks = values<T>(c.rank, ranks * count);
    std::vector<T> all(ranks * count), in_place(ranks * count), crossed(ranks * count);
    c.all_gather({mine.data(), count}, {all.data(), ranks * count});
    std::copy(mine.begin(), mine.end(), in_place.begin() + ptrdiff_t(size_t(c.rank) * count));
    c.all_gather({in_place.data() + size_t(c.rank) * count, count}, {in_place.data(), ranks * count});
    c.all_to_all({blocks.data(), ranks * count}, {crossed.data(), ranks * count});
    for (size_t r = 0; r < ranks; r++) {
        const auto its = values<T>(int(r), count), for_me = part(values<T>(int(r), ranks * count), size_t(c.rank), count);
        expect_bits("all_gather", all.data() + r * count, its.data(), count);
        expect_bits("all_gather in place", in_place.data() + r * count, its.data(), count);
        expect_bits("all_to_all", crossed.data() + r * count, for_me.data(), count);
        auto data = mine;
        c.broadcast({data.data(), count}, int(r));
        expect_bits("broadcast", data.data(), its.data(), count);
    }
}

// Two slices for each rank, whose lengths differ between pairs of ranks; some are empty.
template <class T> void uneven(Comm &c) {
    const size_t ranks = size_t(c.size), own = size_t(c.rank);
    const auto slice = [](size_t from, size_t to, size_t i) {
        return values<T>(int(from + 10 * to + 100 * i), (from * 5 + to * 3 + i) % 4 * 37);
    };
    std::vector<std::vector<T>> sent, received;
    std::vector<Slice> send, recv;
    for (size_t r = 0; r < ranks; r++)
        for (size_t i : {0, 1}) sent.push_back(slice(own, r, i)), received.emplace_back(slice(r, own, i).size());
    for (std::vector<T> &v : sent) send.emplace_back(v.data(), v.size());
    for (std::vector<T> &v : received) recv.emplace_back(v.data(), v.size());
    c.exchange_all(send, recv);
    for (size_t i = 0; i < received.size(); i++)
        expect_bits("exchange_all", received[i].data(), slice(i / 2, own, i % 2).data(), received[i].size());
}

template <class T> void every_call(Comm &c) {
    uneven<T>(c);
    for (size_t count : {size_t(0), size_t(1), size_t(3), size_t(1001)}) {
        sums<T>(c, count);
        moves<T>(c, count);
    }
}

// Larger than one piece of the sum (4 MiB for all ranks), with an odd last piece.
inline void large_sums(Comm &c) { sums<float>(c, (size_t(1) << 20) / size_t(c.size) + 1001); }

inline void agreement(Comm &c) {
    const double big = c.rank == 0 ? 1e16 : 1;
    double want = 1e16;
    for (int r = 1; r < c.size; r++) want += 1;
    EXPECT_EQ(c.sum(big), want);
    EXPECT_EQ(c.sum(int64_t(c.rank) << 40), int64_t(c.size * (c.size - 1) / 2) << 40);
    EXPECT_EQ(c.sum(std::vector<double>{1, double(c.rank)}),
              (std::vector<double>{double(c.size), double(c.size * (c.size - 1) / 2)}));
    EXPECT_EQ(c.sum(std::vector<double>()), std::vector<double>());
    EXPECT_EQ(c.max(-double(c.rank + 1)), -1);
    EXPECT_TRUE(c.all(true));
    EXPECT_EQ(c.all(c.rank != c.size - 1), false);
    c.barrier();
    const auto texts = c.gather(std::string(size_t(c.rank) * 3, 'x'));
    ASSERT_EQ(texts.size(), size_t(c.size));
    for (size_t r = 0; r < texts.size(); r++) EXPECT_EQ(texts[r], std::string(r * 3, 'x'));
}

// Several hops around the ring are in flight at once, with other calls between them. Even ranks wait for the last hop first. The hop from
// rank r to r + 1 is empty if (r + hop) % 3 is 0.
inline void ring(Comm &c) {
    constexpr size_t hops = 4, count = 777;
    const int to = (c.rank + 1) % c.size, from = (c.rank + c.size - 1) % c.size;
    std::vector<std::vector<float>> sent(hops), received(hops);
    std::vector<Request> requests;
    for (size_t h = 0; h < hops; h++) {
        auto full = [&](int r) { return (size_t(r) + h) % 3 != 0 ? count + h : 0; };
        sent[h] = values<float>(c.rank + int(h) * 100, full(c.rank));
        received[h].resize(full(from));
        requests.push_back(c.exchange({sent[h].data(), sent[h].size()}, to, {received[h].data(), received[h].size()}, from));
        EXPECT_EQ(c.sum(int64_t(1)), c.size);
    }
    for (size_t i = 0; i < hops; i++) {
        const size_t h = c.rank % 2 ? i : hops - 1 - i, n = received[h].size();
        c.wait(std::move(requests[h]));
        expect_bits("exchange", received[h].data(), values<float>(from + int(h) * 100, n).data(), n);
    }
    c.wait(c.exchange({}, -1, {}, -1));
}

// Both ways around the ring at once, with more data than any buffer in between holds.
inline void large_exchange(Comm &c) {
    constexpr size_t count = size_t(3) << 20;
    const int next = (c.rank + 1) % c.size, before = (c.rank + c.size - 1) % c.size;
    const auto mine = values<int32_t>(c.rank, count);
    std::vector<int32_t> up(count), down(count);
    Request first = c.exchange({mine.data(), count}, next, {up.data(), count}, before);
    Request second = c.exchange({mine.data(), count}, before, {down.data(), count}, next);
    c.wait(std::move(second)), c.wait(std::move(first));
    expect_bits("exchange", up.data(), values<int32_t>(before, count).data(), count);
    expect_bits("exchange", down.data(), values<int32_t>(next, count).data(), count);
}

// The calls of two communicators interleave: rank 0 of a pair starts its exchanges before a sum over all ranks, rank 1 after it.
inline void calls_overtake(Comm &c) {
    constexpr size_t count = 300001;
    const auto pair = c.split(c.rank / 2, c.rank);
    const int other = pair->size - 1 - pair->rank;
    std::vector<float> mine[2], its[2];
    Request requests[2];
    const auto begin = [&] {
        for (int i = 0; i < 2; i++) {
            mine[i] = values<float>(c.rank + i * 100, count + size_t(i)), its[i].resize(count + size_t(i));
            requests[i] = pair->exchange({mine[i].data(), mine[i].size()}, other, {its[i].data(), its[i].size()}, other);
        }
    };
    if (pair->rank == 0) begin();
    EXPECT_EQ(c.sum(int64_t(1)), c.size);
    if (pair->rank == 1) begin();
    for (int i = 0; i < 2; i++) {
        pair->wait(std::move(requests[i]));
        const int from = c.rank - pair->rank + other + i * 100;
        expect_bits("exchange", its[i].data(), values<float>(from, its[i].size()).data(), its[i].size());
    }
}

// Calls of a mesh's rows, of at most two ranks, and of its columns, which number their ranks backwards.
inline void rows_and_columns(Comm &c) {
    const auto row = c.split(c.rank / 2, c.rank), column = c.split(c.rank % 2, -c.rank);
    const int in_row = std::min(2, c.size - c.rank / 2 * 2), in_column = (c.size + 1 - c.rank % 2) / 2;
    EXPECT_EQ(row->size, in_row);
    EXPECT_EQ(row->rank, c.rank % 2);
    EXPECT_EQ(column->size, in_column);
    EXPECT_EQ(column->rank, in_column - 1 - c.rank / 2);
    int64_t members = 0;
    for (int r = c.rank / 2 * 2; r < c.rank / 2 * 2 + in_row; r++) members += 1 << r;
    EXPECT_EQ(row->sum(int64_t(1) << c.rank), members);
    EXPECT_EQ(c.sum(int64_t(1)), c.size);
    every_call<float>(*column);
    every_call<bf16>(*row);
    const auto again = column->split(0, 0);
    EXPECT_EQ(again->rank, column->rank);
    agreement(*again);
    ring(*again);
}

inline void errors_are_agreed(Comm &c) {
    agree(c, [] {});
    EXPECT_EQ(error_of([&] { agree(c, [] { die("no such file"); }); }), "no such file");
    const std::string last = format("rank %d: disk full", c.size - 1);
    const auto one_fails = [&] { agree(c, [&] { c.rank == c.size - 1 ? die("disk full") : void(); }); };
    EXPECT_EQ(error_of(one_fails), c.size == 1 ? "disk full" : last);
}

// After a mismatch all ranks die with the same message, and their communicator can still be used.
inline void mismatch_is_named(Comm &c) {
    if (c.size == 1) return;
    const int last = c.size - 1;
    std::vector<float> data(size_t(c.size) * 3);
    c.check = true;
    const std::string call = error_of([&] {
        if (c.rank == last) c.all_gather({data.data(), 3}, {data.data(), data.size()});
        else c.all_reduce_sum({data.data(), 5});
    });
    const std::string where = format("comm_checks.h:%d", __LINE__ - 3), other = format("comm_checks.h:%d", __LINE__ - 2);
    expect_contains(
        call, {format("rank %d is at all_gather(3 f32) ", last), where + " while rank 0 is at all_reduce_sum(5 f32)", other});
    expect_error(
        [&] {
            c.all_reduce_sum({data.data(), c.rank == 0 ? size_t(4) : size_t(5)});
        },
        {"rank 1 is at all_reduce_sum(5 f32)"});
    // rank 0 sends to rank 1, which expects nothing
    expect_error(
        [&] {
            c.wait(c.exchange({data.data(), c.rank == 0 ? size_t(2) : size_t(0)}, 1, {}, 0));
        },
        {"rank 0 is at exchange(2 f32 to 1, 0 from 0)"});
    every_call<float>(c);
    ring(c);
    rows_and_columns(c);
    c.check = false;
}

// Rank 0 is `seconds` late for each kind of call. The waiting ranks together use less than a fifth of that time. `who`: RUSAGE_THREAD or
// RUSAGE_SELF.
inline void waiting_is_idle(Comm &c, double seconds, int who) {
    const auto cpu_seconds = [&] {
        rusage used;
        getrusage(who, &used);
        return double(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + 1e-6 * double(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
    };
    const size_t n = 4096, ranks = size_t(c.size);
    std::vector<float> one(n), all(n * ranks), other(n * ranks);
    const int next = (c.rank + 1) % c.size, before = (c.rank + c.size - 1) % c.size;
    const Slice a{one.data(), n}, whole{all.data(), n * ranks}, crossed{other.data(), n * ranks}, hop{other.data(), n};
    const std::pair<const char *, std::function<void()>> calls[] = {
        {"all_reduce_sum", [&] { c.all_reduce_sum(a); }},
        {"reduce_scatter_sum", [&] { c.reduce_scatter_sum(whole, a); }},
        {"all_gather", [&] { c.all_gather(a, whole); }},
        {"all_to_all", [&] { c.all_to_all(whole, crossed); }},
        {"broadcast", [&] { c.broadcast(a, 0); }},
        {"exchange", [&] { c.wait(c.exchange(a, next, hop, before)); }},
        {"barrier", [&] { c.barrier(); }},
        {"split", [&] { c.split(0, 0); }},
        {"sum", [&] { c.sum(1.0); }},
    };
    for (const auto &[name, call] : calls) {
        c.barrier();
        if (c.rank == 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        const double start = cpu_seconds();
        call();
        const double used = c.sum(c.rank == 0 ? 0 : cpu_seconds() - start);
        if (c.rank == 0) printf("  %-40s %.4f s of %.2f s\n", name, used, seconds);
        EXPECT_LT(used, seconds / 5) << name;
    }
}

inline void everything(Comm &c) {
    every_call<float>(c), every_call<double>(c), every_call<bf16>(c);
    every_call<int32_t>(c), every_call<int64_t>(c), every_call<uint8_t>(c);
    large_sums(c);
    agreement(c);
    ring(c);
    large_exchange(c);
    calls_overtake(c);
    rows_and_columns(c);
    errors_are_agreed(c);
    mismatch_is_named(c);
}

}  // namespace comm_checks
