#include "json.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <unordered_set>

#include "common.h"
#include "file.h"

using nlohmann::json;

static constexpr size_t max_count = INT32_MAX;
static constexpr int max_depth = 64;
static constexpr const char *fix = "\n  fix: correct it there, or use an unchanged copy of the file";

json parse_json(std::string_view text, const std::string &where) {
    std::vector<std::unordered_set<std::string>> keys;  // keys of the open objects
    const auto check = [&](int depth, json::parse_event_t event, json &value) {
        using Event = json::parse_event_t;
        if (depth > max_depth) die("%s: nested more than %d deep%s", where.c_str(), max_depth, fix);
        if (event == Event::object_start) keys.emplace_back();
        if (event == Event::object_end) keys.pop_back();
        if (event == Event::key && !keys.back().insert(value.get<std::string>()).second)
            die("%s: \"%s\" appears twice%s", where.c_str(), value.get<std::string>().c_str(), fix);
        return true;
    };
    try {
        return json::parse(text, check);
    } catch (const json::exception &error) {  // "[json.exception.parse_error.101] parse error at line 3, column 5: ..."
        const std::string what = error.what(), reason = what.substr(std::min(what.find("] ") + 2, what.size()), 200);
        die("%s: not valid JSON: %s%s", where.c_str(), reason.c_str(), fix);
    }
}

json read_json(const std::string &path, size_t max_bytes) {
    const InputFile file(path);
    if (file.size() > max_bytes)
        die("%s: has %zu bytes, more than the %zu that are read%s", path.c_str(), file.size(), max_bytes, fix);
    std::string text(file.size(), '\0');
    file.read(text.data(), text.size(), 0);
    return parse_json(text, path);
}

void write_json(const std::string &path, const json &value) {
    // A string that is not UTF-8, such as a path, must not prevent saving.
    write_file(path, value.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
}

Fields::Fields(const json &object, const std::string &where, const std::string &prefix)
    : object_(object), where_(where), prefix_(prefix) {
    if (!object.is_object())
        die("%s: %s must be an object {...}%s", where.c_str(),
            prefix.empty() ? "it" : prefix.substr(0, prefix.size() - 1).c_str(), fix);
}

const json *Fields::find(const std::string &name) const {
    const auto it = object_.find(name);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
}

const json *Fields::find_or_refuse(const std::string &name, bool optional) const {
    const json *value = find(name);
    if (!value && !optional) refuse(name, "is missing");
    return value;
}

void Fields::refuse(const std::string &name, const std::string &why) const {
    const bool has_fix = why.find("\n  fix: ") != why.npos;
    throw Error(where_ + ": " + prefix_ + name + " " + why + (has_fix ? "" : fix));
}

std::string shown(const json &value) {
    const std::string text = value.dump(-1, ' ', true);
    return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

size_t Fields::count(const std::string &name, std::optional<size_t> fallback) const {
    const json *value = find_or_refuse(name, fallback.has_value());
    if (!value) return *fallback;
    const bool whole = value->is_number_unsigned() || (value->is_number_integer() && value->get<int64_t>() > 0);
    if (!whole || value->get<uint64_t>() == 0 || value->get<uint64_t>() > max_count)
        refuse(name, format("is %s, but must be an integer from 1 to %zu", shown(*value).c_str(), max_count));
    return value->get<uint64_t>();
}

size_t Fields::size(const std::string &name) const {
    const json *value = find_or_refuse(name, false);
    if (!value->is_number_unsigned() || value->get<uint64_t>() > INT64_MAX)
        refuse(name, format("is %s, but must be an integer from 0 to %lld", shown(*value).c_str(), (long long)INT64_MAX));
    return value->get<size_t>();
}

double Fields::number(const std::string &name, std::optional<double> fallback) const {
    const json *value = find_or_refuse(name, fallback.has_value());
    if (!value) return *fallback;
    if (!value->is_number() || !std::isfinite(value->get<double>()))
        refuse(name, format("is %s, but must be a number", shown(*value).c_str()));
    return value->get<double>();
}

bool Fields::boolean(const std::string &name, std::optional<bool> fallback) const {
    const json *value = find_or_refuse(name, fallback.has_value());
    if (!value) return *fallback;
    if (!value->is_boolean()) refuse(name, format("is %s, but must be true or false", shown(*value).c_str()));
    return value->get<bool>();
}

std::string Fields::text(const std::string &name, std::optional<std::string> fallback) const {
    const json *value = find_or_refuse(name, fallback.has_value());
    if (!value) return *fallback;
    if (!value->is_string()) refuse(name, format("is %s, but must be a string", shown(*value).c_str()));
    return value->get<std::string>();
}

std::vector<int32_t> Fields::ids(const std::string &name) const {
    const json *value = find(name);
    if (!value) return {};
    std::vector<int32_t> out;
    for (const json &id : value->is_array() ? *value : json::array({*value})) {
        const bool whole = id.is_number_unsigned() || (id.is_number_integer() && id.get<int64_t>() >= 0);
        if (!whole || id.get<uint64_t>() > max_count)
            refuse(name, format("is %s, but must be a token id or a list of them", shown(*value).c_str()));
        out.push_back(int32_t(id.get<uint64_t>()));
    }
    return out;
}

Fields Fields::object(const std::string &name) const {
    return Fields(*find_or_refuse(name, false), where_, prefix_ + name + ".");
}
