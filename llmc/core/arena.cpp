#include "arena.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "common.h"

static constexpr size_t guard_bytes = 256;
static constexpr uint8_t guard_pattern = 0xA5;
static constexpr uint8_t poison_pattern = 0xFF;  // a NaN in f32 and in bf16, -1 as an index

void Plan::add(void **pointer, std::string name, const char *dtype, size_t element, std::vector<size_t> shape, size_t first,
               size_t last) {
    size_t bytes = element;
    for (size_t n : shape)
        if (__builtin_mul_overflow(bytes, n, &bytes))
            die("%s is too large to address: its size overflows 64 bits\n  fix: use a smaller model, or lower --row_tokens",
                name.c_str());
    if (bytes == 0) {  // the model lacks this array
        *pointer = nullptr;
        return;
    }
    segments_.push_back({std::move(name), dtype, std::move(shape), bytes, first, last, pointer, 0, alignment});
}

void Plan::travels() {
    Segment &s = segments_.back();
    s.alignment = store_alignment, s.bytes = round_up(s.bytes, store_alignment);
}

size_t Plan::add_place(std::string name, size_t bytes) {
    places_.emplace_back(std::move(name), round_up(bytes, store_alignment));
    return std::exchange(store_bytes_, store_bytes_ + places_.back().second);
}

void Plan::place(bool guards) {
    guards_ = guards;
    std::vector<size_t> order(segments_.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return segments_[a].bytes > segments_[b].bytes; });

    struct Placed {
        size_t begin, end, first, last;
    };
    std::vector<Placed> placed;  // sorted by begin
    bytes_ = 0;
    for (size_t i : order) {
        Segment &s = segments_[i];
        const size_t room = round_up(s.bytes + (guards ? guard_bytes : 0), alignment);
        size_t at = guards ? round_up(bytes_, s.alignment) : 0;  // with guards `placed` stays empty
        for (const Placed &p : placed) {
            if (p.last < s.first || s.last < p.first) continue;  // their lifetimes do not overlap
            if (at + room <= p.begin) break;                     // the gap before p is large enough
            at = std::max(at, round_up(p.end, s.alignment));
        }
        s.offset = at;
        bytes_ = std::max(bytes_, at + room);
        if (guards) continue;
        const auto behind =
            std::upper_bound(placed.begin(), placed.end(), at, [](size_t x, const Placed &p) { return x < p.begin; });
        placed.insert(behind, {at, at + room, s.first, s.last});
    }
}

size_t Plan::sum() const {
    size_t sum = 0;
    for (const Segment &s : segments_) sum += s.bytes;
    return sum;
}

size_t Plan::state_bytes() const {
    size_t sum = 0;
    for (size_t i = 0; i < state_; i++) sum += round_up(segments_[i].bytes, alignment);
    return sum;
}

// "act.12.qkv" -> "act.*.qkv": one line for all layers.
static std::string without_numbers(const std::string &name) {
    std::string out;
    for (size_t i = 0; i < name.size(); i++)
        if (!isdigit(name[i]) || (i > 0 && name[i - 1] != '.' && out.back() != '*')) out += name[i];
        else if (out.empty() || out.back() != '*') out += '*';
    return out;
}

std::string Plan::table() const {
    struct Line {
        size_t count = 0, bytes = 0;
        const Segment *one = nullptr;
    };
    std::vector<std::string> names;
    std::map<std::string, Line> lines;
    for (const Segment &s : segments_) {
        Line &line = lines[without_numbers(s.name)];
        if (line.count == 0) names.push_back(without_numbers(s.name));
        line.count++, line.bytes += s.bytes, line.one = &s;
    }
    std::string out = format("%-28s %5s %-5s %-24s %12s %12s\n", "array", "count", "type", "shape", "bytes each", "in all");
    for (const std::string &name : names) {
        const Line &line = lines[name];
        std::string shape;
        for (size_t n : line.one->shape) shape += (shape.empty() ? "" : " x ") + std::to_string(n);
        out += format("%-28s %5zu %-5s %-24s %12s %12s\n", name.c_str(), line.count, line.one->dtype, shape.c_str(),
                      human_bytes(line.one->bytes).c_str(), human_bytes(line.bytes).c_str());
    }
    const auto line = [&](const char *what, size_t bytes) { out += format("%-78s %12s\n", what, human_bytes(bytes).c_str()); };
    line("sum", sum());
    line("placed: arrays that never live together share bytes", bytes());
    line("  weights, gradients, optimizer", state_bytes());
    line("  activations and buffers", bytes() - state_bytes());
    return out;
}

size_t Plan::store_bytes(const std::string &prefix) const {
    size_t sum = 0;
    for (const auto &[name, bytes] : places_) sum += name.starts_with(prefix) ? bytes : 0;
    return sum;
}

std::string Plan::store_table(const char *where) const {
    std::map<std::string, std::pair<size_t, size_t>> lines;  // name: count, bytes
    for (const auto &[name, bytes] : places_) {
        auto &[count, sum] = lines[without_numbers(name)];
        count++, sum += bytes;
    }
    std::string out;
    for (const auto &[name, line] : lines)
        out += format("%-28s %5zu %-43s %12s\n", name.c_str(), line.first, where, human_bytes(line.second).c_str());
    if (!lines.empty()) out += format("%-78s %12s\n", format("in all %s", where).c_str(), human_bytes(store_bytes()).c_str());
    return out;
}

Arena::Arena(const Plan &plan, Memory &memory) : plan_(plan), memory_(memory), base_(memory.allocate(plan.bytes())) {
    for (const Segment &s : plan.segments()) {
        *s.pointer = base_ + s.offset;
        if (plan.guards()) memory_.fill(base_ + s.offset + s.bytes, guard_pattern, guard_bytes);
    }
    for (auto [pointer, added] : plan.aliases_) *pointer = *added;
}

Arena::~Arena() { memory_.release(base_, plan_.bytes()); }

void Arena::check_guards() const {
    if (!plan_.guards()) return;
    for (const Segment &s : plan_.segments()) {
        const auto guard = read(memory_, base_ + s.offset + s.bytes, guard_bytes);
        for (size_t i = 0; i < guard_bytes; i++)
            if (guard[i] != std::byte(guard_pattern))
                die("an op wrote behind the end of %s (%s), at its byte %zu", s.name.c_str(), human_bytes(s.bytes).c_str(),
                    s.bytes + i);
    }
}

void Arena::clear_new(size_t before, size_t now) {
    for (const Segment &s : plan_.segments())
        if (before < s.first && s.first <= now && s.last != Plan::always && !s.guest) memory_.fill(base_ + s.offset, 0, s.bytes);
}

// Returns the index of the first element that is not finite; `count` if all are.
template <class X> static size_t first_nonfinite(Memory &memory, const std::byte *data, size_t count) {
    size_t found = count;
    in_parts(count, [&](size_t first, size_t n) {
        if (found < count) return;
        const auto part = read(memory, reinterpret_cast<const X *>(data) + first, n);
        const auto at = std::find_if(part.begin(), part.end(), [](X x) { return !std::isfinite(float(x)); });
        if (at != part.end()) found = first + size_t(at - part.begin());
    });
    return found;
}

// True if an op of `layer` may have written the array: "act.12.qkv" belongs to layer 12, and a name without a number to no layer.
static bool may_be_of(const std::string &name, size_t layer) {
    size_t number = layer;
    sscanf(name.c_str(), "act.%zu.", &number);
    return number == layer || number == layer + 1;
}

std::string Arena::nonfinite(size_t now, size_t layer) const {
    for (size_t i = plan_.state_; i < plan_.segments().size(); i++) {
        const Segment &s = plan_.segments()[i];
        if (now < s.first || s.last < now || s.guest || !may_be_of(s.name, layer)) continue;
        const bool floats = s.dtype == std::string(dtype_name<float>);
        if (!floats && s.dtype != std::string(dtype_name<bf16>)) continue;
        const std::byte *data = base_ + s.offset;
        const size_t count = s.bytes / (floats ? sizeof(float) : sizeof(bf16));
        const size_t at = floats ? first_nonfinite<float>(memory_, data, count) : first_nonfinite<bf16>(memory_, data, count);
        if (at < count) return format("element %zu of %s", at, s.name.c_str());
    }
    return "";
}

void Arena::poison_dead(size_t now, std::optional<size_t> before) {
    if (plan_.guards()) return;  // poison would overwrite the guards
    using Bytes = std::pair<size_t, size_t>;
    std::vector<Bytes> alive, candidates;
    if (!before) candidates.push_back({0, plan_.bytes()});
    for (const Segment &s : plan_.segments())
        if (const Bytes bytes{s.offset, s.offset + s.bytes}; s.first <= now && now <= s.last) alive.push_back(bytes);
        else if (before && s.first <= *before && *before <= s.last) candidates.push_back(bytes);
    if (candidates.empty()) return;
    std::sort(alive.begin(), alive.end());
    alive.push_back({plan_.bytes(), plan_.bytes()});
    size_t at = 0;
    for (const auto &[begin, end] : alive) {
        for (const auto &[first, last] : candidates)
            if (const size_t from = std::max(at, first), to = std::min(begin, last); from < to)
                memory_.fill(base_ + from, poison_pattern, to - from);
        at = std::max(at, end);
    }
}
