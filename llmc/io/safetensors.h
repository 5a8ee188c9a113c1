// safetensors (https://github.com/huggingface/safetensors): u64 length of a JSON header, the header
// {"name": {"dtype", "shape", "data_offsets"}, ..., "__metadata__": {string: string}}, then the tensors' bytes without gaps,
// row-major and little-endian. The reader trusts no field: a malformed file ends in a message, never in a crash.
#pragma once
#include <bit>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../core/common.h"
#include "../core/dtype.h"
#include "../core/file.h"
#include "../core/memory.h"

static_assert(std::endian::native == std::endian::little, "tensors are read and written in the byte order of memory");

using Shape = std::vector<size_t>;
using Metadata = std::map<std::string, std::string>;

struct TensorInfo {  // a tensor that a file has
    std::string dtype;
    Shape shape;
    size_t begin, bytes;  // begin: offset in the file
};

struct TensorSpec {  // a tensor that will be written
    std::string name;
    Shape shape;
    std::string dtype;
};

template <class T> constexpr const char *safetensors_dtype = nullptr;
template <> inline constexpr const char *safetensors_dtype<float> = "F32";
template <> inline constexpr const char *safetensors_dtype<double> = "F64";
template <> inline constexpr const char *safetensors_dtype<bf16> = "BF16";
template <> inline constexpr const char *safetensors_dtype<uint8_t> = "U8";
template <> inline constexpr const char *safetensors_dtype<uint16_t> = "U16";
template <> inline constexpr const char *safetensors_dtype<int32_t> = "I32";
template <> inline constexpr const char *safetensors_dtype<int64_t> = "I64";

size_t dtype_bytes(const std::string &dtype);  // 0 if the dtype is unknown
size_t elements(const Shape &shape);
std::string shape_text(const Shape &shape);  // "(4096, 1024)"

class SafetensorsFile {
  public:
    explicit SafetensorsFile(const std::string &path);

    const std::string &path() const { return file_.path(); }
    const InputFile &file() const { return file_; }
    const std::map<std::string, TensorInfo> &tensors() const { return tensors_; }
    const Metadata &metadata() const { return metadata_; }

    const TensorInfo &at(const std::string &name) const;  // dies if the file lacks the tensor
    const TensorInfo &expect_shape(const std::string &name, const Shape &shape) const;

    // Reads a tensor of F32, F16 or BF16, converted to X (float or bf16), in row-major order. read_part reads `count` elements, from element
    // `first` on. Both are thread-safe. Each call needs a buffer of 1 MiB.
    template <class X> void read(const std::string &name, X *dst) const;
    template <class X> void read_part(const std::string &name, size_t first, size_t count, X *dst) const;

    // Returns the stored elements. Dies unless their dtype is T.
    template <class T> std::vector<T> array(const std::string &name) const {
        return array_part<T>(name, 0, elements(at(name).shape));
    }
    template <class T> std::vector<T> array_part(const std::string &name, size_t first, size_t count) const {
        std::vector<T> values(count);
        read_stored(name, safetensors_dtype<T>, first, count, values.data());
        return values;
    }

  private:
    void parse_header();
    const TensorInfo &expect_part(const std::string &name, size_t first, size_t count) const;
    void read_stored(const std::string &name, const char *dtype, size_t first, size_t count, void *dst) const;

    InputFile file_;
    std::map<std::string, TensorInfo> tensors_;
    Metadata metadata_;
};

// Writes a file: the constructor declares every tensor, and the calls of write() supply their data in the declared order. finish() gives the file
// its name; without finish() no file appears.
class SafetensorsWriter {
  public:
    SafetensorsWriter(const std::string &path, std::vector<TensorSpec> specs, const Metadata &metadata = {{"format", "pt"}});

    // Writes a tensor from `data` in `memory`. float and bf16 are rounded to the declared F32 or BF16; any other T must be the
    // declared dtype.
    template <class T> void write(const std::string &name, const T *data, Memory &memory);
    // Writes the next `count` elements of a tensor.
    template <class T> void write_part(const std::string &name, const T *data, size_t count, Memory &memory);
    bool complete() const { return next_ == specs_.size(); }  // true if every tensor has its data
    void finish();

  private:
    OutputFile file_;
    std::vector<TensorSpec> specs_;
    size_t next_ = 0, filled_ = 0;  // the current tensor, and the number of its elements written so far
};
