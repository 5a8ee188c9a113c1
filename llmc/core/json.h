// Reads JSON files. A message about a file gives the position of the error, and a message about a value names its field.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

constexpr size_t json_max_bytes = size_t(64) << 20;

// Messages call the text `where`. Stricter than JSON: a key must not occur twice in one object, and the nesting is at most 64 deep.
nlohmann::json parse_json(std::string_view text, const std::string &where);
nlohmann::json read_json(const std::string &path, size_t max_bytes = json_max_bytes);
std::string shown(const nlohmann::json &value);                         // its text for messages, shortened
void write_json(const std::string &path, const nlohmann::json &value);  // indented by 2, through PATH.tmp

// Typed access to the fields of one JSON object. A field that is null counts as absent. An absent field returns its fallback; without a
// fallback it is an error. The object must outlive its Fields.
class Fields {
  public:
    Fields(const nlohmann::json &object, const std::string &where, const std::string &prefix = "");

    const nlohmann::json *find(const std::string &name) const;  // null if absent
    const nlohmann::json &source() const { return object_; }
    bool has(const std::string &name) const { return find(name) != nullptr; }
    bool is_null(const std::string &name) const { return object_.contains(name) && !has(name); }
    size_t count(const std::string &name, std::optional<size_t> fallback = {}) const;   // an integer from 1 to 2^31 - 1
    size_t size(const std::string &name) const;                                         // an integer from 0 to 2^63 - 1
    double number(const std::string &name, std::optional<double> fallback = {}) const;  // finite
    bool boolean(const std::string &name, std::optional<bool> fallback = {}) const;
    std::string text(const std::string &name, std::optional<std::string> fallback = {}) const;
    std::vector<int32_t> ids(const std::string &name) const;  // token ids: an integer or a list of them; absent: empty
    Fields object(const std::string &name) const;

    // Dies with "config.json: head_dim WHY", and with a general fix if WHY has none.
    [[noreturn]] void refuse(const std::string &name, const std::string &why) const;

  private:
    const nlohmann::json *find_or_refuse(const std::string &name, bool optional) const;

    const nlohmann::json &object_;
    std::string where_, prefix_;
};
