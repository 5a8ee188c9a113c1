#include "checkpoint.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <optional>

#include "../core/common.h"
#include "../core/file.h"
#include "../core/hash.h"
#include "../core/json.h"
#include "../io/safetensors.h"
#include "../parallel/comm.h"

namespace fs = std::filesystem;
using nlohmann::json;

// ---- checked files --------------------------------------------------------------------------------------------------------------------

static const char *const checksum_name = "checksum";

static std::string content_checksum(const json &value) {  // of the text that write_json writes, without spaces
    return hash_of(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

void write_checked_json(const std::string &path, json value) {
    value[checksum_name] = content_checksum(value);
    write_json(path, value);
}

json read_checked_json(const std::string &path, const std::string &fix) {
    json value;
    try {
        value = read_json(path);
    } catch (const Error &error) {
        const std::string what = error.what();
        die("%s%s", what.substr(0, what.find("\n  fix: ")).c_str(), fix.c_str());
    }
    const json written = value.is_object() ? value.value(checksum_name, json()) : json();
    if (!written.is_string()) die("%s: is damaged: it has no checksum%s", path.c_str(), fix.c_str());
    value.erase(checksum_name);
    if (written != content_checksum(value)) die("%s: is damaged: its checksum is of other content%s", path.c_str(), fix.c_str());
    return value;
}

std::optional<size_t> step_of(const std::string &name) {
    size_t step;
    if (!name.starts_with("step_")) return {};
    const auto parsed = std::from_chars(name.data() + 5, name.data() + name.size(), step);
    if (parsed.ec != std::errc() || name != format("step_%zu", step)) return {};
    return step;
}

std::vector<size_t> checkpoint_steps(const std::string &output_dir) {
    std::vector<size_t> steps;
    std::error_code absent;
    for (const auto &entry : fs::directory_iterator(output_dir, absent))
        for (const char *file : {"trainer_state.json", "optimizer.json"})
            if (const auto step = step_of(entry.path().filename()); step && fs::exists(entry.path() / file, absent)) {
                steps.push_back(*step);
                break;
            }
    std::sort(steps.begin(), steps.end());
    return steps;
}

std::string other_checkpoint(const std::string &dir) {
    fs::path path = fs::weakly_canonical(dir);
    if (step_of(path.parent_path().filename())) path = path.parent_path();  // path was a directory inside a checkpoint
    const fs::path output_dir = path.parent_path();
    const auto steps = checkpoint_steps(output_dir);
    const auto end = std::lower_bound(steps.begin(), steps.end(), step_of(path.filename()).value_or(0));
    if (end == steps.begin()) return "\n  fix: --overwrite begins again; there is no checkpoint before this one";
    return "\n  fix: --resume " + checkpoint_path(output_dir, end[-1]);
}

// ---- the optimizer: writing -----------------------------------------------------------------------------------------------------------

static constexpr size_t format_version = 1, block_elements = size_t(1) << 20;  // a block has one checksum

static constexpr struct {
    const char *name;
    AnyFloats OptimizerPart::*data;
} tensors[] = {{"master", &OptimizerPart::master}, {"m", &OptimizerPart::m}, {"v", &OptimizerPart::v}};
static constexpr size_t v_tensor = 2;

static bool has(const OptimizerPart &part, size_t tensor) { return tensor != v_tensor || part.has_v; }

static AnyFloats behind(const AnyFloats &floats, size_t n) {
    return std::visit([&](auto f) -> AnyFloats { return f + n; }, floats);
}
static std::vector<float> read(Memory &memory, const AnyFloats &from, size_t n) {
    return std::visit([&](auto f) { return read_floats(memory, f, n); }, from);
}

static std::string manifest_path(const std::string &dir) { return dir + "/optimizer.json"; }

template <class T> static std::string checksum(const std::vector<T> &data) {
    return hash_of(data.data(), data.size() * sizeof(T));
}

static std::string header_checksum(const InputFile &file, size_t bytes) {
    std::vector<std::byte> header(bytes);
    file.read(header.data(), bytes, 0);
    return checksum(header);
}

// Writes a rank's parts and returns their entry in the manifest.
static json write_shard(const std::string &dir, const std::string &name, const OptimizerState &state, size_t rank) {
    const std::string path = dir + "/" + name;
    std::vector<OptimizerPart> own = state.parts;
    std::erase_if(own, [&](const OptimizerPart &part) { return part.writers <= rank; });
    json parts;
    for (const OptimizerPart &part : own) parts.push_back({{"global", part.global}, {"count", part.count}});
    std::vector<TensorSpec> specs;
    size_t data = 0;  // bytes
    for (size_t t = 0; t < std::size(tensors); t++) {
        size_t n = 0;
        for (const OptimizerPart &part : own) n += has(part, t) ? part.count : 0;
        if (n) specs.push_back({tensors[t].name, {n}, "F32"});
        data += n * sizeof(float);
    }
    SafetensorsWriter writer(path, specs);
    HostMemory host;
    for (size_t t = 0; t < std::size(tensors); t++)
        for (size_t p = 0; const OptimizerPart &part : own) {
            json &entry = parts[p++];
            if (!has(part, t)) continue;
            json &checksums = entry[tensors[t].name] = json::array();
            const auto write_block = [&](size_t first, size_t n) {
                state.open(part);
                const auto block = read(*state.memory, behind(part.*tensors[t].data, first), n);
                checksums.push_back(checksum(block));
                writer.write_part(tensors[t].name, block.data(), n, host);
            };
            in_parts(part.count, write_block, block_elements);
        }
    writer.finish();
    const InputFile file(path);
    const size_t header = file.size() - data;
    return {{"name", name}, {"bytes", file.size()}, {"header", header_checksum(file, header)}, {"parts", parts}};
}

void save_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state) {
    const size_t writers = std::min(state.writers, size_t(comm.size));
    json entry;
    agree(comm, [&] {
        if (size_t(comm.rank) < writers && !state.parts.empty())
            entry = write_shard(dir, format("optimizer-%05d-of-%05zu.safetensors", comm.rank, writers), state, size_t(comm.rank));
    });
    const auto entries = comm.gather(entry.dump());
    agree(comm, [&] {
        if (comm.rank != 0) return;
        json manifest = {{"version", format_version}, {"elements", state.count}, {"files", json::array()}};
        if (state.tensor_ranks > 1) manifest["tensor_parallel"] = state.tensor_ranks;
        for (const std::string &text : entries)
            if (text != "null") manifest["files"].push_back(json::parse(text));
        write_checked_json(manifest_path(dir), manifest);
    });
}

// ---- the optimizer: reading -----------------------------------------------------------------------------------------------------------

namespace {

using OfTensors = std::array<size_t, std::size(tensors)>;

struct StoredPart {
    size_t global, count;
    OfTensors begin;                                         // index of the part's first element in each tensor of its file
    std::vector<std::string> checksums[std::size(tensors)];  // one per block; empty if the file lacks that tensor of the part
};

struct Shard {
    std::string name, header;
    size_t bytes;
    OfTensors count = {};  // of all parts
    std::vector<StoredPart> parts;
};

// A range of elements that this rank needs and one file holds.
struct RestoredRun {
    const std::string &path;
    const char *tensor;
    size_t global, count;
    const OptimizerPart &part;  // the same elements in the rank's state
    AnyFloats kept;             // (count), from a tensor of `part`
    const float *stored;        // (count), from the file, on the host
};

}  // namespace

static const json &list_of(const Fields &fields, const char *name) {
    const json *value = fields.find(name);
    if (!value || !value->is_array()) fields.refuse(name, "is missing or not a list");
    return *value;
}

static StoredPart parse_part(const Fields &fields, const OfTensors &begin, size_t elements) {
    StoredPart part{fields.size("global"), fields.size("count"), begin, {}};
    if (part.global > elements) fields.refuse("global", format("is beyond the %zu elements", elements));
    if (part.count > elements - part.global) fields.refuse("count", format("reaches beyond the %zu elements", elements));
    for (size_t t = 0; t < std::size(tensors); t++) {
        const char *name = tensors[t].name;
        if (t == v_tensor && !fields.find(name)) continue;
        const size_t blocks = ceil_div(part.count, block_elements);
        const json &checksums = list_of(fields, name);
        if (checksums.size() != blocks) fields.refuse(name, format("has %zu checksums instead of %zu", checksums.size(), blocks));
        for (const json &value : checksums) {
            if (!value.is_string()) fields.refuse(name, "is not a list of checksums");
            part.checksums[t].push_back(value);
        }
    }
    return part;
}

static Shard parse_shard(const Fields &fields, const std::string &where, const std::string &prefix, size_t elements) {
    Shard shard{fields.text("name"), fields.text("header"), fields.size("bytes"), {}, {}};
    if (shard.name.find('/') != std::string::npos) fields.refuse("name", "is not a file name in the same directory");
    for (const json &entry : list_of(fields, "parts")) {
        const Fields part(entry, where, format("%sparts[%zu].", prefix.c_str(), shard.parts.size()));
        const StoredPart &stored = shard.parts.emplace_back(parse_part(part, shard.count, elements));
        for (size_t t = 0; t < std::size(tensors); t++)
            if (!stored.checksums[t].empty()) shard.count[t] += stored.count;
    }
    return shard;
}

// Checks that every element of the model is in exactly one file, once.
static void check_cover(const std::vector<Shard> &shards, size_t elements, const std::string &where) {
    std::vector<std::pair<size_t, size_t>> ranges;  // [begin, end)
    for (const Shard &shard : shards)
        for (const StoredPart &part : shard.parts) ranges.emplace_back(part.global, part.global + part.count);
    ranges.emplace_back(elements, elements);
    std::sort(ranges.begin(), ranges.end());
    const std::string fix = other_checkpoint(fs::path(where).parent_path());
    size_t at = 0;
    for (const auto &[begin, end] : ranges) {
        if (begin > at) die("%s: elements [%zu, %zu) are in no file%s", where.c_str(), at, begin, fix.c_str());
        if (begin < at) die("%s: elements [%zu, %zu) are in two files%s", where.c_str(), begin, std::min(at, end), fix.c_str());
        at = end;
    }
}

static std::vector<Shard> read_manifest(const std::string &where, size_t elements) {
    const json manifest = read_checked_json(where, other_checkpoint(fs::path(where).parent_path()));
    const Fields fields(manifest, where);
    if (const size_t version = fields.size("version"); version != format_version)
        fields.refuse("version", format("is %zu, but this program reads %zu", version, format_version));
    if (const size_t stored = fields.size("elements"); stored != elements)
        die("%s: holds the state of %zu elements, but the model has %zu\n  fix: use the model that the run began with",
            where.c_str(), stored, elements);
    std::vector<Shard> shards;
    for (const json &entry : list_of(fields, "files")) {
        const std::string prefix = format("files[%zu].", shards.size());
        shards.push_back(parse_shard(Fields(entry, where, prefix), where, prefix, elements));
    }
    check_cover(shards, elements, where);
    return shards;
}

// Checks a file's size, and its header's checksum, before the header is parsed.
static void check_shard(const std::string &path, const Shard &shard, const std::string &manifest, const std::string &fix) {
    std::error_code error;
    const size_t bytes = fs::file_size(path, error);
    if (error) die("%s: %s, but %s names it%s", path.c_str(), error.message().c_str(), manifest.c_str(), fix.c_str());
    if (bytes != shard.bytes) die("%s: has %zu bytes, but %zu were written%s", path.c_str(), bytes, shard.bytes, fix.c_str());
    const size_t data = std::accumulate(shard.count.begin(), shard.count.end(), size_t(0)) * sizeof(float);
    if (data > bytes || header_checksum(InputFile(path), bytes - data) != shard.header)
        die("%s: is damaged: its header differs from the written one%s", path.c_str(), fix.c_str());
}

// Returns the elements of [begin, end) that this rank holds, as parts that point into its state.
static std::vector<OptimizerPart> kept_of(const OptimizerState &state, size_t begin, size_t end) {
    std::vector<OptimizerPart> out;
    for (const OptimizerPart &part : state.parts) {
        const size_t from = std::max(part.global, begin), to = std::min(part.global + part.count, end),
                     skipped = from - part.global;
        if (from < to)
            out.push_back({from, to - from, behind(part.master, skipped), behind(part.m, skipped), behind(part.v, skipped),
                           part.piece, part.has_v});
    }
    return out;
}

using Visit = std::function<void(const RestoredRun &)>;

// Reads only the blocks that hold elements of this rank, and verifies the checksum of each.
static void visit_part(const SafetensorsFile &file, const StoredPart &part, const OptimizerState &state, const Visit &visit,
                       const std::string &fix) {
    std::vector<float> block;
    for (size_t t = 0; t < std::size(tensors); t++) {
        const auto &tensor = tensors[t];
        const auto visit_block = [&](size_t first, size_t n) {
            const size_t begin = part.global + first;
            auto kept = kept_of(state, begin, begin + n);
            std::erase_if(kept, [&](const OptimizerPart &k) { return !has(k, t); });
            if (kept.empty()) return;
            if (part.checksums[t].empty())
                die("%s: has no tensor \"%s\" for elements [%zu, %zu) of the model%s", file.path().c_str(), tensor.name, begin,
                    begin + n, fix.c_str());
            block.resize(n);
            file.read_part(tensor.name, part.begin[t] + first, n, block.data());
            if (checksum(block) != part.checksums[t][first / block_elements])
                die("%s: tensor \"%s\" is damaged: elements [%zu, %zu) of the model differ from the written ones%s",
                    file.path().c_str(), tensor.name, begin, begin + n, fix.c_str());
            for (const OptimizerPart &k : kept)
                visit({file.path(), tensor.name, k.global, k.count, k, k.*tensor.data, &block[k.global - begin]});
        };
        in_parts(part.count, visit_block, block_elements);
    }
}

static void visit_shard(const std::string &dir, const Shard &shard, const OptimizerState &state, const Visit &visit) {
    const auto is_needed = [&](const StoredPart &part) { return !kept_of(state, part.global, part.global + part.count).empty(); };
    if (std::none_of(shard.parts.begin(), shard.parts.end(), is_needed)) return;
    const std::string fix = other_checkpoint(dir);
    check_shard(dir + "/" + shard.name, shard, manifest_path(dir), fix);
    const SafetensorsFile file(dir + "/" + shard.name);
    for (size_t t = 0; t < std::size(tensors); t++)
        if (shard.count[t]) file.expect_shape(tensors[t].name, {shard.count[t]});
    for (const StoredPart &part : shard.parts) visit_part(file, part, state, visit, fix);
}

// Calls visit(run) for all elements that this rank holds.
static void visit_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state, const Visit &visit) {
    agree(comm, [&] {
        for (const Shard &shard : read_manifest(manifest_path(dir), state.count)) visit_shard(dir, shard, state, visit);
    });
}

size_t tensor_ranks_of(Comm &comm, const std::string &dir) {
    size_t ranks = 1;
    agree(comm, [&] {
        const std::string where = manifest_path(dir);
        const json manifest = read_checked_json(where, other_checkpoint(dir));
        const Fields fields(manifest, where);
        if (fields.find("tensor_parallel")) ranks = fields.size("tensor_parallel");
    });
    return ranks;
}

void load_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state) {
    visit_optimizer(comm, dir, state, [&](const RestoredRun &p) {
        state.open(p.part);
        std::visit([&](auto kept) { write(*state.memory, kept, std::vector(p.stored, p.stored + p.count)); }, p.kept);
        state.keep(p.part);
    });
}

void verify_optimizer(Comm &comm, const std::string &dir, const OptimizerState &state) {
    visit_optimizer(comm, dir, state, [&](const RestoredRun &p) {
        state.open(p.part);
        if (memcmp(p.stored, read(*state.memory, p.kept, p.count).data(), p.count * sizeof(float)) != 0)
            die("%s was written but reads back differently (tensor \"%s\", near element %zu)\n  fix: use another disk; this one loses data",
                p.path.c_str(), p.tensor, p.global);
    });
}

// ---- the checkpoints of a run ---------------------------------------------------------------------------------------------------------

std::string checkpoint_path(const std::string &output_dir, size_t step) {
    return format("%s/step_%zu", output_dir.c_str(), step);
}

std::string latest_checkpoint(const std::string &output_dir) {
    const auto steps = checkpoint_steps(output_dir);
    return steps.empty() ? "" : checkpoint_path(output_dir, steps.back());
}
