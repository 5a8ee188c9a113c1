#include "safetensors.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../core/json.h"

using nlohmann::json;

static constexpr size_t max_header_bytes = 100'000'000;  // as in the reference implementation
static constexpr size_t chunk_bytes = size_t(1) << 20;

size_t dtype_bytes(const std::string &dtype) {
    static const std::map<std::string, size_t> bytes = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
                                                        {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},
                                                        {"I32", 4},  {"F32", 4}, {"U64", 8}, {"I64", 8},     {"F64", 8}};
    const auto it = bytes.find(dtype);
    return it == bytes.end() ? 0 : it->second;
}

size_t elements(const Shape &shape) {
    size_t n = 1;
    for (size_t size : shape) n *= size;
    return n;
}

std::string shape_text(const Shape &shape) {
    std::string text;
    for (size_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    return "(" + text + ")";
}

// ---- header -------------------------------------------------------------------------------------------------------------------

// Ends the messages about malformed files.
static constexpr const char *fetch_again = "\n  fix: fetch the file again, or save the model again";

static bool is_size(const json &value) { return value.is_number_unsigned(); }

static bool is_sizes(const json &value) { return value.is_array() && std::all_of(value.begin(), value.end(), is_size); }

static Metadata parse_metadata(const json &value, const std::string &path) {
    Metadata metadata;
    if (!value.is_object()) die("%s: __metadata__ is not an object%s", path.c_str(), fetch_again);
    for (const auto &[key, text] : value.items()) {
        if (!text.is_string()) die("%s: __metadata__ \"%s\" is not a string%s", path.c_str(), key.c_str(), fetch_again);
        metadata[key] = text.get<std::string>();
    }
    return metadata;
}

// Parses one entry of the header. `data` is the offset of the first byte after the header, and `data_bytes` counts all bytes after it.
static TensorInfo parse_tensor(const std::string &name, const json &entry, size_t data, size_t data_bytes,
                               const std::string &path) {
    const auto fail = [&](const std::string &what) {
        die("%s: tensor \"%s\": %s%s", path.c_str(), name.c_str(), what.c_str(), fetch_again);
    };
    if (!entry.is_object()) fail("its entry in the header is not an object");
    const json dtype = entry.value("dtype", json()), shape = entry.value("shape", json());
    const json offsets = entry.value("data_offsets", json());
    if (!dtype.is_string()) fail("its dtype is missing or not a string");
    if (!is_sizes(shape)) fail("its shape is missing or not a list of sizes");
    if (!is_sizes(offsets) || offsets.size() != 2) fail("its data_offsets are missing or not two byte positions");

    TensorInfo info{dtype.get<std::string>(), shape.get<Shape>(), 0, 0};
    const size_t begin = offsets[0].get<size_t>(), end = offsets[1].get<size_t>();
    size_t bytes = dtype_bytes(info.dtype);
    if (bytes == 0) fail(format("its dtype is %s, which is not supported", info.dtype.c_str()));
    for (size_t size : info.shape)
        if (__builtin_mul_overflow(bytes, size, &bytes)) fail("its shape has more bytes than a file can hold");
    if (begin > end || end > data_bytes)
        fail(format("its bytes [%zu, %zu) are outside the file's data of %zu bytes", begin, end, data_bytes));
    if (end - begin != bytes)
        fail(format("%s of %s is %zu bytes but data_offsets span %zu", info.dtype.c_str(), shape_text(info.shape).c_str(), bytes,
                    end - begin));
    info.begin = data + begin;
    info.bytes = bytes;
    return info;
}

// Tensors must fill the file from the header to the end, without gaps.
static void check_layout(const std::map<std::string, TensorInfo> &tensors, size_t data, size_t file_bytes,
                         const std::string &path) {
    std::vector<std::pair<size_t, std::string>> order;
    for (const auto &[name, info] : tensors) order.emplace_back(info.begin, name);
    // Among tensors that begin at the same byte, empty ones come first.
    std::sort(order.begin(), order.end(), [&](const auto &a, const auto &b) {
        return std::pair(a.first, tensors.at(a.second).bytes) < std::pair(b.first, tensors.at(b.second).bytes);
    });
    size_t at = data;
    for (const auto &[begin, name] : order) {
        if (begin != at)
            die("%s: tensor \"%s\" %s%s", path.c_str(), name.c_str(),
                begin < at ? "overlaps another" : format("has a hole of %zu bytes before it", begin - at).c_str(), fetch_again);
        at += tensors.at(name).bytes;
    }
    if (at != file_bytes) die("%s: %zu bytes follow the last tensor%s", path.c_str(), file_bytes - at, fetch_again);
}

SafetensorsFile::SafetensorsFile(const std::string &path) : file_(path) { parse_header(); }

void SafetensorsFile::parse_header() {
    const char *name = path().c_str();
    uint64_t header_bytes;
    if (file_.size() < sizeof header_bytes)
        die("%s: has %zu bytes and is not a safetensors file%s", name, file_.size(), fetch_again);
    file_.read(&header_bytes, sizeof header_bytes, 0);
    if (header_bytes > max_header_bytes)
        die("%s: its header claims %zu bytes, more than %zu: not a safetensors file%s", name, size_t(header_bytes),
            max_header_bytes, fetch_again);
    if (header_bytes > file_.size() - sizeof header_bytes)
        die("%s: its header claims %zu bytes but the file has %zu%s", name, size_t(header_bytes), file_.size(), fetch_again);
    std::string text(header_bytes, '\0');
    file_.read(text.data(), text.size(), sizeof header_bytes);

    const json header = parse_json(text, path() + " (header)");
    if (!header.is_object()) die("%s: its header is not a JSON object%s", name, fetch_again);
    const size_t data = sizeof header_bytes + header_bytes;
    for (const auto &[key, entry] : header.items())
        if (key == "__metadata__") metadata_ = parse_metadata(entry, path());
        else tensors_[key] = parse_tensor(key, entry, data, file_.size() - data, path());
    check_layout(tensors_, data, file_.size(), path());
}

const TensorInfo &SafetensorsFile::at(const std::string &name) const {
    const auto it = tensors_.find(name);
    if (it == tensors_.end())
        die("%s: has no tensor \"%s\"\n  fix: use a file that matches the configuration", path().c_str(), name.c_str());
    return it->second;
}

const TensorInfo &SafetensorsFile::expect_shape(const std::string &name, const Shape &shape) const {
    const TensorInfo &info = at(name);
    if (info.shape != shape)
        die("%s: tensor \"%s\" has shape %s, but %s is needed\n  fix: use a file that matches the configuration", path().c_str(),
            name.c_str(), shape_text(info.shape).c_str(), shape_text(shape).c_str());
    return info;
}

// ---- conversion ---------------------------------------------------------------------------------------------------------------

struct f16 {  // IEEE half precision, only read and never written
    uint16_t bits;
    operator float() const {
        const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
        const float subnormal =
            float(fraction) * 0x1p-24f;  // a normal float, independent of the FPU's handling of subnormal floats
        const uint32_t normal = (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
        return std::bit_cast<float>(sign | (exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : normal));
    }
};

template <class To, class From> static void convert(To *to, const From *from, size_t n) {
    for (size_t i = 0; i < n; i++) to[i] = To(float(from[i]));
}

template <class X, class Stored> static void read_as(const InputFile &file, size_t offset, size_t count, X *dst) {
    if constexpr (std::is_same_v<X, Stored>) {
        file.read(dst, count * sizeof(X), offset);
    } else {
        std::vector<Stored> buffer(std::min(count, chunk_bytes / sizeof(Stored)));
        for (size_t at = 0; at < count; at += buffer.size()) {
            const size_t n = std::min(buffer.size(), count - at);
            file.read(buffer.data(), n * sizeof(Stored), offset + at * sizeof(Stored));
            convert(dst + at, buffer.data(), n);
        }
    }
}

const TensorInfo &SafetensorsFile::expect_part(const std::string &name, size_t first, size_t count) const {
    const TensorInfo &info = at(name);
    const size_t n = elements(info.shape);
    if (first > n || count > n - first)
        die("%s: tensor \"%s\" has %zu elements, not %zu from %zu on%s", path().c_str(), name.c_str(), n, count, first,
            fetch_again);
    return info;
}

template <class X> void SafetensorsFile::read_part(const std::string &name, size_t first, size_t count, X *dst) const {
    const TensorInfo &info = expect_part(name, first, count);
    const size_t offset = info.begin + first * dtype_bytes(info.dtype);
    if (info.dtype == "F32") return read_as<X, float>(file_, offset, count, dst);
    if (info.dtype == "F16") return read_as<X, f16>(file_, offset, count, dst);
    if (info.dtype == "BF16") return read_as<X, bf16>(file_, offset, count, dst);
    die("%s: tensor \"%s\" is %s, but weights are read from F32, F16 or BF16\n  fix: save the model in one of these",
        path().c_str(), name.c_str(), info.dtype.c_str());
}

template <class X> void SafetensorsFile::read(const std::string &name, X *dst) const {
    read_part(name, 0, elements(at(name).shape), dst);
}

template void SafetensorsFile::read(const std::string &, float *) const;
template void SafetensorsFile::read(const std::string &, bf16 *) const;
template void SafetensorsFile::read_part(const std::string &, size_t, size_t, float *) const;
template void SafetensorsFile::read_part(const std::string &, size_t, size_t, bf16 *) const;

void SafetensorsFile::read_stored(const std::string &name, const char *dtype, size_t first, size_t count, void *dst) const {
    const TensorInfo &info = expect_part(name, first, count);
    if (info.dtype != dtype)
        die("%s: tensor \"%s\" is %s, but %s is needed%s", path().c_str(), name.c_str(), info.dtype.c_str(), dtype, fetch_again);
    const size_t bytes = dtype_bytes(dtype);
    file_.read(dst, count * bytes, info.begin + first * bytes);
}

// ---- writing ------------------------------------------------------------------------------------------------------------------

static std::string header_of(const std::vector<TensorSpec> &specs, const Metadata &metadata, const std::string &path) {
    std::string text = "{\"__metadata__\":" + json(metadata).dump();
    size_t begin = 0;
    for (const TensorSpec &spec : specs) {
        if (dtype_bytes(spec.dtype) == 0) die("%s: cannot write dtype %s", path.c_str(), spec.dtype.c_str());
        const size_t end = begin + elements(spec.shape) * dtype_bytes(spec.dtype);
        const json entry = {{"dtype", spec.dtype}, {"shape", spec.shape}, {"data_offsets", {begin, end}}};
        text += format(",%s:%s", json(spec.name).dump().c_str(), entry.dump().c_str());
        begin = end;
    }
    text += "}";
    return text + std::string(round_up(text.size(), 8) - text.size(), ' ');  // aligns the data
}

SafetensorsWriter::SafetensorsWriter(const std::string &path, std::vector<TensorSpec> specs, const Metadata &metadata)
    : file_(path), specs_(std::move(specs)) {
    const std::string header = header_of(specs_, metadata, path);
    const uint64_t bytes = header.size();
    file_.write(&bytes, sizeof bytes);
    file_.write(header.data(), header.size());
}

template <class Stored, class T> static void write_as(OutputFile &file, const T *data, size_t count, Memory &memory) {
    std::vector<T> part;
    std::vector<Stored> converted;
    in_parts(count, [&](size_t first, size_t n) {
        part.resize(n), converted.resize(n);
        memory.read(part.data(), data + first, n * sizeof(T));
        for (size_t i = 0; i < n; i++) converted[i] = Stored(part[i]);
        file.write(converted.data(), n * sizeof(Stored));
    });
}

template <class T> void SafetensorsWriter::write(const std::string &name, const T *data, Memory &memory) {
    write_part(name, data, complete() ? 0 : elements(specs_[next_].shape), memory);
}

template <class T> void SafetensorsWriter::write_part(const std::string &name, const T *data, size_t count, Memory &memory) {
    const char *path = file_.path().c_str();
    if (complete() || specs_[next_].name != name) die("%s: tensor \"%s\" is not the next that was declared", path, name.c_str());
    const TensorSpec &spec = specs_[next_];
    const size_t left = elements(spec.shape) - filled_;
    if (count > left) die("%s: tensor \"%s\" lacks %zu elements, not %zu", path, name.c_str(), left, count);
    if (count == left) next_++, filled_ = 0;
    else filled_ += count;
    if (spec.dtype == safetensors_dtype<T>) return write_as<T>(file_, data, count, memory);
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, bf16>) {
        if (spec.dtype == "F32") return write_as<float>(file_, data, count, memory);
        if (spec.dtype == "BF16") return write_as<bf16>(file_, data, count, memory);
    }
    die("%s: tensor \"%s\" is declared as %s and cannot be written from %s", path, name.c_str(), spec.dtype.c_str(),
        safetensors_dtype<T>);
}

void SafetensorsWriter::finish() {
    if (!complete()) die("%s: tensor \"%s\" was declared but not written", file_.path().c_str(), specs_[next_].name.c_str());
    file_.commit();
}

template void SafetensorsWriter::write(const std::string &, const float *, Memory &);
template void SafetensorsWriter::write_part(const std::string &, const float *, size_t, Memory &);
template void SafetensorsWriter::write(const std::string &, const double *, Memory &);
template void SafetensorsWriter::write_part(const std::string &, const double *, size_t, Memory &);
template void SafetensorsWriter::write(const std::string &, const bf16 *, Memory &);
template void SafetensorsWriter::write_part(const std::string &, const bf16 *, size_t, Memory &);
template void SafetensorsWriter::write(const std::string &, const uint8_t *, Memory &);
template void SafetensorsWriter::write(const std::string &, const uint16_t *, Memory &);
template void SafetensorsWriter::write(const std::string &, const int32_t *, Memory &);
template void SafetensorsWriter::write(const std::string &, const int64_t *, Memory &);
