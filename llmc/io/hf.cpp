#include "hf.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "../core/json.h"

using nlohmann::json;
namespace fs = std::filesystem;

static bool exists(const std::string &path) {
    std::error_code error;  // an inaccessible directory counts as missing
    return fs::exists(path, error);
}

static const std::string single_name = model_files.single, index_name = model_files.index;

bool HfWeights::present(const std::string &dir) {
    if (exists(dir + "/" + single_name) || exists(dir + "/" + index_name)) return true;
    for (const char *other : {"pytorch_model.bin", "pytorch_model.bin.index.json"})
        if (exists(dir + "/" + other))
            die("%s has its weights in %s, which this program does not read\n  fix: load it with transformers and save_pretrained() it",
                dir.c_str(), other);
    return false;
}

HfWeights::HfWeights(const std::string &dir, const WeightFiles &files) : kind_(files) {
    const std::string single = dir + "/" + files.single;
    if (!*files.index && !exists(single))
        die("%s has no %s\n  fix: give the directory of an adapter that PEFT or this program has saved", dir.c_str(),
            files.single);
    if (*files.index && !present(dir))
        die("%s has neither %s nor %s\n  fix: give the directory of a Hugging Face model with its weights", dir.c_str(),
            single_name.c_str(), index_name.c_str());
    if (exists(single)) open_single(single);
    else listing_ = dir + "/" + index_name, open_shards(dir);
}

void HfWeights::open_single(const std::string &path) {
    listing_ = path;
    const SafetensorsFile &file = files_.try_emplace(kind_.single, path).first->second;
    for (const auto &entry : file.tensors()) where_[entry.first] = &file;
}

void HfWeights::open_shards(const std::string &dir) {
    const json index = read_json(listing_);
    for (const auto &[name, value] : Fields(index, listing_).object("weight_map").source().items()) {
        if (!value.is_string() || value.get<std::string>().find('/') != std::string::npos)
            die("%s: weight_map \"%s\" is not the name of a file in its directory\n  fix: fetch the model again",
                listing_.c_str(), name.c_str());
        const std::string shard = value.get<std::string>(), path = dir + "/" + shard;
        if (!files_.contains(shard) && !exists(path))
            die("%s is missing, but %s names it\n  fix: fetch the model again", path.c_str(), listing_.c_str());
        const SafetensorsFile &file = files_.try_emplace(shard, path).first->second;
        if (!file.tensors().contains(name))
            die("%s: has no tensor \"%s\", but %s lists it\n  fix: fetch the model again", path.c_str(), name.c_str(),
                listing_.c_str());
        where_[name] = &file;
    }
}

// Alternative names of tensors: Yi's first upload, InternLM2 and Qwen3-Next. Some are of a tensor that has the rows of several (rows_in).
static constexpr std::pair<const char *, const char *> spellings[] = {
    {".input_layernorm.", ".ln1."},
    {".post_attention_layernorm.", ".ln2."},
    {".input_layernorm.", ".attention_norm."},
    {".post_attention_layernorm.", ".ffn_norm."},
    {".self_attn.q_proj.", ".attention.wqkv."},
    {".self_attn.k_proj.", ".attention.wqkv."},
    {".self_attn.v_proj.", ".attention.wqkv."},
    {".self_attn.o_proj.", ".attention.wo."},
    {".mlp.gate_proj.", ".feed_forward.w1."},
    {".mlp.up_proj.", ".feed_forward.w3."},
    {".mlp.down_proj.", ".feed_forward.w2."},
    {".embed_tokens.", ".tok_embeddings."},
    {"lm_head.", "output."},
    {".in_proj_qkv.", ".in_proj_qkvz."},
    {".in_proj_z.", ".in_proj_qkvz."},
    {".in_proj_b.", ".in_proj_ba."},
    {".in_proj_a.", ".in_proj_ba."},
};

// A matrix of an expert, "model.layers.0.mlp.experts.7.gate_proj.weight", in files that may have a tensor of all experts'.
struct ExpertName {
    std::string all;  // "model.layers.0.mlp.experts.gate_up_proj"; empty if the name is not an expert's
    size_t number = 0;
    bool up = false;
    explicit ExpertName(const std::string &name) {
        const size_t begin = name.find(".experts."), at = begin + strlen(".experts.");
        if (begin == name.npos) return;
        const size_t dot = name.find('.', at);
        const std::string matrix = dot == name.npos ? "" : name.substr(dot);
        up = matrix == ".up_proj.weight";
        if (!up && matrix != ".gate_proj.weight" && matrix != ".down_proj.weight") return;
        number = std::stoul(name.substr(at));
        all = name.substr(0, at) + (matrix == ".down_proj.weight" ? "down_proj" : "gate_up_proj");
    }
};

HfWeights::FileOfTensor::const_iterator HfWeights::entry_of(const std::string &name) const {
    if (const auto it = where_.find(kind_.prefix + name); it != where_.end()) return it;
    const std::string prefix = "transformer.";  // GPT-2's names on the hub lack this prefix
    if (name.starts_with(prefix)) return where_.find(name.substr(prefix.size()));
    // Names of the text model within a multimodal model.
    if (const auto it = where_.find("language_model." + name); it != where_.end()) return it;
    if (name.starts_with("model."))
        if (const auto it = where_.find("model.language_model." + name.substr(strlen("model."))); it != where_.end()) return it;
    for (const auto &[ours, theirs] : spellings)
        if (const size_t at = name.find(ours); at != name.npos)
            if (const auto it = where_.find(std::string(name).replace(at, strlen(ours), theirs)); it != where_.end()) return it;
    if (const ExpertName expert(name); !expert.all.empty()) return entry_of(expert.all);
    if (const auto other = others_.find(name); other != others_.end()) return entry_of(other->second);
    return where_.end();
}

// Rows of a tensor in the files: `runs` runs of `rows` rows, whose first rows are `stride` apart.
struct RowRuns {
    size_t first, rows, stride = 0, runs = 1;
};

// Returns the rows that one of our tensors has of the tensor `stored`, which several of ours share; none if it is one tensor there, too.
//
// InternLM2 has for each KV head the rows of its query heads, of the key head and of the value head. Qwen3-Next has for each key head of linear
// attention those of its queries, keys, values and z; and those of b and a. Mixtures of Qwen3.5 have for each expert those of gate and up.
static std::vector<RowRuns> rows_in(const std::string &name, const std::string &stored, const Shape &shape,
                                    const std::string &dir) {
    const auto is = [&](const char *part) { return stored.find(part) != stored.npos; };
    const auto asks_for = [&](const char *part) { return name.find(part) != name.npos; };
    if (shape.empty()) return {};
    if (const ExpertName expert(name); stored.ends_with(".experts.gate_up_proj") || stored.ends_with(".experts.down_proj")) {
        const size_t all = shape.size() == 3 ? shape[1] : 0, rows = stored.ends_with("down_proj") ? all : all / 2;
        return {{expert.number * all + expert.up * rows, rows}};
    }
    if (!is(".attention.wqkv.") && !is(".in_proj_qkvz.") && !is(".in_proj_ba.")) return {};
    const json source = read_json(dir + "/config.json");
    const Fields config(source, "config.json");
    if (is(".attention.wqkv.")) {
        const size_t H = config.count("num_attention_heads"), KV = config.count("num_key_value_heads", H), group = H / KV;
        const size_t D = shape[0] / (H + 2 * KV), before = asks_for(".q_proj.") ? 0 : group + asks_for(".v_proj.");
        return {{before * D, asks_for(".q_proj.") ? group * D : D, (group + 2) * D, KV}};
    }
    const size_t Hk = config.count("linear_num_key_heads", 16), values = config.count("linear_num_value_heads", 32) / Hk;
    if (is(".in_proj_ba.")) return {{asks_for("_a.") ? values : 0, values, 2 * values, Hk}};
    const size_t Dk = config.count("linear_key_head_dim", 128), V = values * config.count("linear_value_head_dim", 128),
                 head = 2 * Dk + 2 * V;
    if (asks_for("_z.")) return {{2 * Dk + V, V, head, Hk}};
    return {{0, Dk, head, Hk}, {Dk, Dk, head, Hk}, {2 * Dk, V, head, Hk}};
}

// Calls f(from, n) for each run of stored elements; together they are our elements [first, first + count).
template <class F> static void for_runs(const std::vector<RowRuns> &rows, size_t columns, size_t first, size_t count, F f) {
    size_t begin = 0;
    for (const RowRuns &r : rows)
        for (size_t run = 0; run < r.runs; run++) {
            const size_t end = begin + r.rows * columns, from = std::max(first, begin), to = std::min(first + count, end);
            if (from < to) f((r.first + run * r.stride) * columns + (from - begin), to - from);
            begin = end;
        }
}

static void expect_rows(const std::string &name, const Shape &shape, const std::vector<RowRuns> &rows, const std::string &stored,
                        const Shape &in_file) {
    size_t count = 0, last = 0;
    for (const RowRuns &r : rows) count += r.runs * r.rows, last = std::max(last, r.first + (r.runs - 1) * r.stride + r.rows);
    if (count * in_file.back() != elements(shape) || last * in_file.back() > elements(in_file))
        die("%s %s is not among the rows of %s %s\n  fix: use the weights that belong to this config.json", name.c_str(),
            shape_text(shape).c_str(), stored.c_str(), shape_text(in_file).c_str());
}

const TensorInfo *HfWeights::find(const std::string &name) const {
    const auto it = entry_of(name);
    return it == where_.end() ? nullptr : &it->second->at(it->first);
}

void HfWeights::extend(const std::string &name, size_t from, size_t to) {
    const auto it = entry_of(name);
    if (it == where_.end()) return;
    const Shape &shape = it->second->at(it->first).shape;
    if (shape.size() != 2 || shape[0] != from || from == 0 || from >= to) return;  // read_part() rejects any other shape
    const size_t columns = shape[1];
    std::vector<double> sums(columns);
    HostMemory host;
    in_parts(
        shape[0],
        [&](size_t first, size_t n) {
            std::vector<float> part(n * columns);
            read_part(name, shape, first * columns, part.size(), part.data(), host);
            for (size_t i = 0; i < part.size(); i++) sums[i % columns] += part[i];
        },
        std::max<size_t>(1, (size_t(1) << 20) / columns));
    std::vector<float> mean(columns);
    for (size_t i = 0; i < columns; i++) mean[i] = float(sums[i] / double(shape[0]));
    means_[it->first] = mean;
}

template <class X>
void HfWeights::read_part(const std::string &name, const Shape &shape, size_t first, size_t count, X *dst, Memory &memory) const {
    const auto it = entry_of(name);
    if (it == where_.end())
        die("%s: has no tensor \"%s%s\", which %sconfig.json asks for\n  fix: use the weights that belong to this configuration",
            listing_.c_str(), kind_.prefix, name.c_str(), *kind_.prefix ? "adapter_" : "");
    const SafetensorsFile &file = *it->second;
    const Shape &in_files = file.at(it->first).shape;
    const auto rows = rows_in(name, it->first, in_files, fs::path(listing_).parent_path().string());
    const auto mean = means_.find(it->first);
    const size_t in_file = mean == means_.end() ? SIZE_MAX : elements(in_files);
    if (!rows.empty()) expect_rows(name, shape, rows, it->first, in_files);
    else if (mean == means_.end()) file.expect_shape(it->first, shape);
    std::vector<X> host;
    in_parts(count, [&](size_t done, size_t n) {
        host.resize(n);
        if (!rows.empty()) {
            X *to = host.data();
            for_runs(rows, in_files.back(), first + done, n, [&](size_t from, size_t run) {
                file.read_part(it->first, from, run, to);
                to += run;
            });
        } else {
            const size_t begin = first + done, stored = std::min(n, in_file - std::min(in_file, begin));
            if (stored) file.read_part(it->first, begin, stored, host.data());
            for (size_t i = stored; i < n; i++) host[i] = X(mean->second[(begin + i) % mean->second.size()]);
        }
        bool finite = true;  // so are the squares, which a norm sums: with infinite ones all its outputs would be 0
        for (X x : host) finite = finite && std::isfinite(float(x) * float(x));
        if (!finite)
            die("%s: %s holds a NaN, an infinity, or a number beyond 1.8e19, whose square is infinite\n  fix: use another directory; these weights were cut off or never trained, or training diverged",
                file.path().c_str(), it->first.c_str());
        write(memory, dst + done, host);
    });
}

template <class X> void HfWeights::read(const std::string &name, const Shape &shape, X *dst, Memory &memory) const {
    read_part(name, shape, 0, elements(shape), dst, memory);
}

template void HfWeights::read(const std::string &, const Shape &, float *, Memory &) const;
template void HfWeights::read(const std::string &, const Shape &, bf16 *, Memory &) const;
template void HfWeights::read_part(const std::string &, const Shape &, size_t, size_t, float *, Memory &) const;
template void HfWeights::read_part(const std::string &, const Shape &, size_t, size_t, bf16 *, Memory &) const;

// Buffers that transformers computes but old files store as tensors: rotary frequencies, and GPT-2's causal masks.
static bool is_buffer(const std::string &name) {
    return name.ends_with("rotary_emb.inv_freq") || name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

std::vector<std::string> HfWeights::paths() const {
    std::vector<std::string> out;
    for (const auto &[name, file] : files_) out.push_back(file.path());
    return out;
}

std::vector<TensorSpec> HfWeights::tensors() const {
    std::vector<TensorSpec> out;
    for (const auto &[name, file] : where_)
        if (!is_buffer(name)) out.push_back({name, file->at(name).shape, file->at(name).dtype});
    return out;
}

static std::string fix_for_unknown(const std::string &name, bool of_adapter) {
    const auto has = [&](const char *part) { return name.find(part) != name.npos; };
    if (has("_orig_mod.") || name.starts_with("module."))
        return "save the model itself, and not what torch.compile or DDP made of it";
    if (has("_scale") || has("absmax") || has("quant_") || has("qweight"))
        return "weights that are not quantised: F32, F16 or BF16";
    if (of_adapter) return "use an adapter of this model that PEFT or this program has saved, or train another";
    if (name.starts_with("score."))
        return "a config.json whose architectures name a reward model (ForSequenceClassification), or a language model";
    return "the config.json that belongs to these weights, or a model that transformers has saved";
}

// Returns the name of the part of a larger model that has this tensor, if that part is not read: MiMo's and Qwen's block for further tokens, or the vision
// tower beside a text model; otherwise null.
const char *HfWeights::other_part(const std::string &name) const {
    if (name.starts_with("model.mtp_layers.") || name.starts_with("mtp.")) return "the block that predicts further tokens";
    const auto begins = [&](const char *prefix) {
        const auto it = where_.lower_bound(prefix);
        return it != where_.end() && it->first.starts_with(prefix);
    };
    const bool is_vision = name.starts_with("model.visual.") || name.find("vision_tower.") != name.npos ||
                           name.find("multi_modal_projector.") != name.npos;
    return is_vision && (begins("language_model.") || begins("model.language_model.")) ? "the vision tower" : nullptr;
}
std::set<std::string> HfWeights::left_out() const {
    std::set<std::string> parts;
    for (const auto &[name, file] : where_)
        if (const char *part = other_part(name)) parts.insert(part);
    return parts;
}

void HfWeights::expect_only(const std::vector<std::string> &known) const {
    std::map<std::string, size_t> names;  // names in the file, and how many of ours each has
    for (const std::string &name : known)
        if (const auto it = entry_of(name); it != where_.end()) names[it->first]++;
    for (const auto &[name, file] : where_) {
        const Shape &shape = file->at(name).shape;
        const size_t experts = shape.empty() ? 0 : shape[0];
        const size_t parts = name.ends_with(".experts.gate_up_proj") ? 2 * experts
                             : name.ends_with(".experts.down_proj")  ? experts
                                                                     : 0;
        if ((!names.contains(name) && !is_buffer(name) && !other_part(name)) || (parts && names[name] != parts))
            die("%s: tensor \"%s\" %s is not part of the model that %sconfig.json describes\n  fix: %s", file->path().c_str(),
                name.c_str(), shape_text(shape).c_str(), *kind_.prefix ? "adapter_" : "",
                fix_for_unknown(name, *kind_.prefix).c_str());
    }
}

bool HfWeights::same(const std::string &name, const HfWeights &other, const std::string &its_name) const {
    const Shape shape = find(name)->shape;
    if (other.find(its_name)->shape != shape) return false;
    bool equal = true;
    HostMemory host;
    in_parts(elements(shape), [&](size_t first, size_t n) {
        std::vector<float> a(n), b(n);
        if (!equal) return;
        read_part(name, shape, first, n, a.data(), host), other.read_part(its_name, shape, first, n, b.data(), host);
        equal = a == b;
    });
    return equal;
}

// (1, 1, n, n), of any type: not 0 where a query sees a key, which must not be later.
bool HfWeights::is_causal_mask(const std::string &name) const {
    const SafetensorsFile &file = *where_.at(name);
    const TensorInfo &info = file.at(name);
    const size_t n = info.shape.empty() ? 0 : info.shape.back(), bytes = dtype_bytes(info.dtype);
    if (info.shape != Shape{1, 1, n, n}) return false;
    std::vector<char> row(n * bytes);
    for (size_t q = 0; q < n; q++) {
        file.file().read(row.data(), row.size(), info.begin + q * row.size());
        for (size_t k = 0; k < n; k++) {
            const auto begin = row.begin() + ptrdiff_t(k * bytes);
            if (std::any_of(begin, begin + ptrdiff_t(bytes), [](char byte) { return byte != 0; }) != (k <= q)) return false;
        }
    }
    return true;
}

void HfWeights::expect_buffers(const std::vector<std::vector<float>> &frequencies) const {
    HostMemory host;
    for (const auto &[name, file] : where_) {
        if (name.ends_with(".attn.bias") && !is_causal_mask(name))
            die("%s: %s %s is not the causal mask that attention has\n  fix: use a model that transformers saved without it",
                file->path().c_str(), name.c_str(), shape_text(file->at(name).shape).c_str());
        if (!name.ends_with("rotary_emb.inv_freq")) continue;
        const Shape shape = file->at(name).shape;
        std::vector<float> stored(elements(shape));
        file->read(name, stored.data());
        const auto near = [&](const std::vector<float> &f) {  // equal except for rounding to 16 bits
            return std::ranges::equal(stored, f, [](float a, float b) { return std::abs(a - b) <= 0.01f * b + 1e-7f; });
        };
        if (std::ranges::none_of(frequencies, near))
            die("%s: %s has other frequencies than config.json gives by rope_theta and rope scaling\n  fix: use the config.json that belongs to these weights; or, if it is right, a model that transformers saved without this tensor",
                file->path().c_str(), name.c_str());
    }
}

HfWriter::HfWriter(const std::string &dir, std::vector<TensorSpec> specs, const WeightFiles &files, size_t shard_bytes)
    : dir_(dir), kind_(files), shards_(1) {
    size_t filled = 0;
    for (TensorSpec &spec : specs) {
        const size_t bytes = elements(spec.shape) * dtype_bytes(spec.dtype);
        spec.name = kind_.prefix + spec.name;
        if (*kind_.index && filled > 0 && filled + bytes > shard_bytes) {
            shards_.emplace_back();
            filled = 0;
        }
        shards_.back().push_back(spec);
        filled += bytes;
    }
    open_shard();
}

std::string HfWriter::file_name(size_t shard) const {
    return shards_.size() == 1 ? kind_.single : format("model-%05zu-of-%05zu.safetensors", shard + 1, shards_.size());
}

void HfWriter::open_shard() { file_ = std::make_unique<SafetensorsWriter>(dir_ + "/" + file_name(shard_), shards_[shard_]); }

template <class X> void HfWriter::write(const std::string &name, const X *data, size_t count, Memory &memory) {
    if (file_->complete() && shard_ + 1 < shards_.size()) {
        file_->finish();
        shard_++;
        open_shard();
    }
    file_->write_part(kind_.prefix + name, data, count, memory);
}

template void HfWriter::write(const std::string &, const float *, size_t, Memory &);
template void HfWriter::write(const std::string &, const bf16 *, size_t, Memory &);

void HfWriter::finish() {
    file_->finish();
    if (shard_ + 1 < shards_.size()) die("%s: %s was not written", dir_.c_str(), file_name(shard_ + 1).c_str());
    if (shards_.size() > 1) write_index();
}

void HfWriter::write_index() const {
    json map = json::object();
    size_t total = 0;
    for (size_t s = 0; s < shards_.size(); s++)
        for (const TensorSpec &spec : shards_[s]) {
            map[spec.name] = file_name(s);
            total += elements(spec.shape) * dtype_bytes(spec.dtype);
        }
    write_json(dir_ + "/" + index_name, {{"metadata", {{"total_size", total}}}, {"weight_map", map}});
}

// The files of copy_tokenizer, except chat templates.
static constexpr const char *tokenizer_files[] = {"/tokenizer.json",    "/tokenizer_config.json", "/special_tokens_map.json",
                                                  "/added_tokens.json", "/tokenizer.model",       "/vocab.json",
                                                  "/merges.txt"};

bool is_model_file(const std::string &name) {
    for (const char *other : {"config.json", "generation_config.json", model_files.single, model_files.index,
                              "adapter_config.json", adapter_files.single, "chat_template.json"})
        if (name == other) return true;
    const bool shard = name.starts_with("model-") && name.ends_with(".safetensors");
    return shard || name.ends_with(".jinja") || std::ranges::count(tokenizer_files, "/" + name);
}

// transformers reads chat_template.jinja and the further templates of additional_chat_templates. Without them it reads the field of
// tokenizer_config.json, a text or a list of named texts. Older versions only know this field, and llama.cpp prefers it. chat_template.json is an
// older name of the first.
static const char *const tokenizer_config = "/tokenizer_config.json", *const template_file = "/chat_template.jinja",
                         *const template_json = "/chat_template.json", *const more_templates = "/additional_chat_templates";

// Returns true if all of these files that a directory has contain this chat template.
static bool has_template(const std::string &dir, const std::string &wanted) {
    std::vector<json> found;
    if (exists(dir + template_file)) {
        const InputFile file(dir + template_file);
        std::string text(file.size(), '\0');
        file.read(text.data(), text.size(), 0);
        found.push_back(text);
    }
    for (const char *name : {tokenizer_config, template_json}) {
        const json source = exists(dir + name) ? read_json(dir + name) : json();
        const json field = source.is_object() ? source.value("chat_template", json()) : json();
        if (!field.is_array() && !field.is_null()) found.push_back(field);
        for (const json &named : field.is_array() ? field : json::array())
            if (named.is_object() && named.value("name", json()) == "default") found.push_back(named.value("template", json()));
    }
    return !found.empty() && std::ranges::all_of(found, [&](const json &text) { return text == wanted; });
}

void copy_vocabulary(const std::string &from_dir, const std::string &to_dir) {
    for (const char *name : {"/tokenizer.model", "/vocab.json", "/merges.txt"})
        if (exists(from_dir + name) && !exists(to_dir + name)) copy_file(from_dir + name, to_dir + name);
}

void copy_tokenizer(const std::string &from_dir, const std::string &to_dir, const std::string &chat_template) {
    const auto copy = [&](const std::string &name) {
        if (exists(from_dir + name)) copy_file(from_dir + name, to_dir + name);
    };
    std::error_code error;
    if (!fs::equivalent(from_dir, to_dir, error)) {
        for (const char *name : tokenizer_files) copy(name);
        if (chat_template.empty() || has_template(from_dir, chat_template)) {
            copy(template_file), copy(template_json);
            if (exists(from_dir + more_templates)) fs::create_directory(to_dir + more_templates, error);
            for (const auto &entry : fs::directory_iterator(from_dir + more_templates, error))
                copy(std::string(more_templates) + "/" + entry.path().filename().string());
        }
    }
    if (chat_template.empty() || !exists(to_dir + "/tokenizer.json") || has_template(to_dir, chat_template)) return;
    write_file(to_dir + template_file, chat_template);
    if (!exists(to_dir + tokenizer_config)) return;
    json config = read_json(to_dir + tokenizer_config);
    config["chat_template"] = chat_template;
    write_json(to_dir + tokenizer_config, config);
}
