#include "hf.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "../core/json.h"

using nlohmann::json;
namespace fs = std::filesystem;

static bool exists(const std::string &path) {
    std::error_code error;  // a directory we may not enter: as if it were not there
    return fs::exists(path, error);
}

static const std::string single_name = model_files.single, index_name = model_files.index;

bool HfWeights::present(const std::string &dir) {
    if (exists(dir + "/" + single_name) || exists(dir + "/" + index_name)) return true;
    for (const char *other : {"pytorch_model.bin", "pytorch_model.bin.index.json"})
        if (exists(dir + "/" + other))
            die("%s has its weights in %s, which we do not read\n  fix: load it with transformers and save_pretrained() it",
                dir.c_str(), other);
    return false;
}

HfWeights::HfWeights(const std::string &dir, const WeightFiles &files) : kind_(files) {
    const std::string single = dir + "/" + files.single;
    if (!*files.index && !exists(single))
        die("%s has no %s\n  fix: the directory of an adapter that PEFT or this program has saved", dir.c_str(), files.single);
    if (*files.index && !present(dir)) die("%s has neither %s nor %s", dir.c_str(), single_name.c_str(), index_name.c_str());
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
            die("%s: weight_map \"%s\" is not the name of a file beside it", listing_.c_str(), name.c_str());
        const std::string shard = value.get<std::string>(), path = dir + "/" + shard;
        if (!files_.contains(shard) && !exists(path))
            die("%s is missing, but %s names it\n  fix: fetch the model again", path.c_str(), listing_.c_str());
        const SafetensorsFile &file = files_.try_emplace(shard, path).first->second;
        if (!file.tensors().contains(name))
            die("%s: has no tensor \"%s\", but %s says so\n  fix: fetch the model again", path.c_str(), name.c_str(),
                listing_.c_str());
        where_[name] = &file;
    }
}

HfWeights::FileOfTensor::const_iterator HfWeights::entry_of(const std::string &name) const {
    const std::string prefix = "transformer.";
    const auto it = where_.find(kind_.prefix + name);
    return it == where_.end() && name.starts_with(prefix) ? where_.find(name.substr(prefix.size())) : it;
}

const TensorInfo *HfWeights::find(const std::string &name) const {
    const auto it = entry_of(name);
    return it == where_.end() ? nullptr : &it->second->at(it->first);
}

template <class X>
void HfWeights::read_part(const std::string &name, const Shape &shape, size_t first, size_t count, X *dst, Memory &memory) const {
    const auto it = entry_of(name);
    if (it == where_.end())
        die("%s: has no tensor \"%s%s\", which %sconfig.json asks for", listing_.c_str(), kind_.prefix, name.c_str(),
            *kind_.prefix ? "adapter_" : "");
    const SafetensorsFile &file = *it->second;
    file.expect_shape(it->first, shape);
    std::vector<X> host;
    in_parts(count, [&](size_t done, size_t n) {
        host.resize(n);
        file.read_part(it->first, first + done, n, host.data());
        bool finite = true;
        for (X x : host) finite = finite && std::isfinite(float(x));
        if (!finite)
            die("%s: %s holds a NaN or an infinity\n  fix: a directory whose weights were saved whole; these were not trained, or diverged",
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

// Buffers that transformers computes but that old files hold as tensors: rotary frequencies, and the causal masks of GPT-2.
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

void HfWeights::expect_only(const std::vector<std::string> &known) const {
    std::set<std::string> names;  // in the file
    for (const std::string &name : known)
        if (const auto it = entry_of(name); it != where_.end()) names.insert(it->first);
    for (const auto &[name, file] : where_)
        if (!names.contains(name) && !is_buffer(name))
            die("%s: tensor \"%s\" %s is not part of the model that %sconfig.json describes", file->path().c_str(), name.c_str(),
                shape_text(file->at(name).shape).c_str(), *kind_.prefix ? "adapter_" : "");
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
    if (*kind_.index) remove_others();
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

// Readers prefer model.safetensors to an index, so a file that an earlier save left would hide the new shards.
void HfWriter::remove_others() const {
    std::set<std::string> ours;
    for (size_t s = 0; s < shards_.size(); s++) ours.insert(file_name(s));
    if (shards_.size() > 1) ours.insert(index_name);
    std::vector<fs::path> others;
    std::error_code error;
    for (const auto &entry : fs::directory_iterator(dir_, error)) {
        const std::string name = entry.path().filename().string();
        const bool weights =
            name == single_name || name == index_name || (name.starts_with("model-") && name.ends_with(".safetensors"));
        if (weights && !ours.contains(name)) others.push_back(entry.path());
    }
    for (const fs::path &path : others)
        if (!fs::remove(path, error)) die("%s: cannot remove: %s", path.c_str(), error.message().c_str());
    sync_directory(dir_);
}

void copy_tokenizer(const std::string &from_dir, const std::string &to_dir) {
    std::error_code error;
    if (fs::equivalent(from_dir, to_dir, error)) return;
    for (const char *name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                             "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"})
        if (exists(from_dir + "/" + name)) copy_file(from_dir + "/" + name, to_dir + "/" + name);
}
