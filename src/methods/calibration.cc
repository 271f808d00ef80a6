#include "kvmosaic/calibration.h"

#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "core/hash.h"
#include "core/text.h"

namespace kvmosaic {

namespace {

constexpr std::string_view kMagic = "kvmosaic-calibration";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxLayers = 100000;

std::string hex16(uint64_t x) {
    std::string out(16, '0');
    for (int i = 15; i >= 0; --i, x >>= 4)
        out[size_t(i)] = "0123456789abcdef"[x & 15];
    return out;
}

std::string print_value(float x) {
    char buffer[32];
    const auto end = std::to_chars(buffer, buffer + sizeof(buffer), x, std::chars_format::general, 9).ptr;
    return {buffer, end};
}

bool parse_value(std::string_view s, float* out) {
    const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), *out);
    return error == std::errc() && end == s.data() + s.size() && std::isfinite(*out);
}

bool is_word(std::string_view s) {
    if (s.empty()) return false;
    for (const char c : s)
        if (!(c >= 'a' && c <= 'z') && !(c >= 'A' && c <= 'Z') && !(c >= '0' && c <= '9') && c != '_') return false;
    return true;
}

bool is_line(std::string_view s) { return !s.empty() && s.find_first_of("\n\r") == std::string_view::npos; }

std::string where(std::string_view name, int32_t layer, int32_t head, Side side) {
    return "array " + std::string(name) + " of layer " + std::to_string(layer) + ", head " + std::to_string(head) +
           ", " + name_of(side) + " side";
}

// Reads the lines one after the other; every failure names the file, the line and the field.
class Reader {
public:
    Reader(const std::string& path, std::string_view bytes) : path_(path), rest_(bytes) {}

    bool done() const { return rest_.empty(); }
    // The words of the next line, which must begin with `field` (unless that is empty).
    bool line(std::string_view field, std::vector<std::string_view>* words) {
        const size_t end = rest_.find('\n');
        ++number_;
        if (end == std::string_view::npos) return fail(field, "the line is missing or cut off");
        line_ = rest_.substr(0, end);
        rest_.remove_prefix(end + 1);
        *words = text::split(line_, ' ');
        if (!field.empty() && words->front() != field)
            return fail(field, "expected here, found " + text::quote(words->front()));
        return true;
    }
    std::string_view whole() const { return line_; }
    bool integer(std::string_view word, std::string_view field, int64_t low, int64_t high, int64_t* out) {
        if (text::parse_integer(word, out) && *out >= low && *out <= high) return true;
        return fail(field,
                    "must be " + std::to_string(low) + " to " + std::to_string(high) + ", not " + text::quote(word));
    }
    bool fail(std::string_view field, const std::string& what) {
        status_ = Status(StatusCode::corrupt, text::quote(path_) + ": line " + std::to_string(number_) +
                                                  (field.empty() ? "" : ", " + std::string(field)) + ": " + what);
        return false;
    }
    const Status& status() const { return status_; }

private:
    std::string path_;
    std::string_view rest_, line_;
    int64_t number_ = 0;
    Status status_;
};

bool read_layers(Reader* in, Calibration* out) {
    std::vector<std::string_view> words;
    int64_t n = 0;
    if (!in->line("layers", &words)) return false;
    if (words.size() != 2) return in->fail("layers", "must be one number");
    if (!in->integer(words[1], "layers", 1, kMaxLayers, &n)) return false;
    for (int64_t i = 0; i < n; ++i) {
        int64_t sizes[5];
        if (!in->line("layer", &words)) return false;
        if (words.size() != 6) return in->fail("layer", "must be five numbers");
        for (size_t j = 0; j < 5; ++j)
            if (!in->integer(words[j + 1], "layer", 0, j == 0 ? kMaxLayers : 65536, &sizes[j])) return false;
        if (sizes[0] != i) return in->fail("layer", "must be number " + std::to_string(i));
        LayerShape layer;
        layer.heads = int32_t(sizes[1]);
        layer.kv_heads = int32_t(sizes[2]);
        layer.key_dim = int32_t(sizes[3]);
        layer.value_dim = int32_t(sizes[4]);
        out->layers.push_back(std::move(layer));
    }
    return true;
}

bool read_array(Reader* in, const std::vector<std::string_view>& words, Calibration* out) {
    if (words.size() < 6) return in->fail("array", "must have a name, a layer, a head, a side and a count");
    CalibrationArray array;
    array.name = words[1];
    if (!is_word(words[1])) return in->fail("array", "name " + text::quote(words[1]) + " is not a word");
    int64_t layer = 0, head = 0, count = 0;
    const std::string field = "array " + array.name;
    if (!in->integer(words[2], field + " layer", -1, int64_t(out->layers.size()) - 1, &layer)) return false;
    if (!in->integer(words[3], field + " head", -1, 65535, &head)) return false;
    if (words[4] != "key" && words[4] != "value")
        return in->fail(field + " side", "must be key or value, not " + text::quote(words[4]));
    if (!in->integer(words[5], field + " count", int64_t(words.size()) - 6, int64_t(words.size()) - 6, &count))
        return false;
    array.layer = int32_t(layer);
    array.head = int32_t(head);
    array.side = words[4] == "key" ? Side::key : Side::value;
    array.values.resize(size_t(count));
    for (size_t i = 0; i < array.values.size(); ++i)
        if (!parse_value(words[i + 6], &array.values[i]))
            return in->fail(field, "value " + std::to_string(i) + " is no finite number: " + text::quote(words[i + 6]));
    out->arrays.push_back(std::move(array));
    return true;
}

bool read_records(Reader* in, std::string_view bytes, Calibration* out) {
    std::vector<std::string_view> words;
    int64_t version = 0;
    if (!in->line(kMagic, &words)) return false;
    if (words.size() != 2) return in->fail(kMagic, "must have a version");
    if (!in->integer(words[1], "version", kVersion, kVersion, &version)) return false;

    // Before anything else is believed: a byte that was changed or lost on the way.
    const size_t last = bytes.rfind("\nchecksum ");
    if (last == std::string_view::npos) return in->fail("checksum", "the last line is missing: the file is cut off");
    out->checksum = fnv1a(bytes.data(), last + 1);
    const std::string sum = hex16(out->checksum);
    if (bytes.substr(last + 1) != "checksum " + sum + "\n")
        return in->fail("checksum", "must be " + sum + " for these bytes: the file was changed or damaged");

    if (!in->line("method", &words)) return false;
    if (words.size() != 2 || !is_word(words[1])) return in->fail("method", "must be one name");
    out->method = words[1];
    if (!in->line("model", &words)) return false;
    if (words.size() != 2 || words[1].empty()) return in->fail("model", "must be one fingerprint, or unknown");
    out->fingerprint = words[1];
    if (!read_layers(in, out)) return false;
    if (!in->line("tokens", &words)) return false;
    if (words.size() != 2) return in->fail("tokens", "must be one number");
    if (!in->integer(words[1], "tokens", 0, int64_t(1) << 53, &out->tokens)) return false;
    if (!in->line("text", &words)) return false;
    if (words.size() < 2) return in->fail("text", "must say which text it was");
    out->text = in->whole().substr(5);
    for (;;) {
        if (!in->line("", &words)) return false;
        if (words[0] == "checksum") return in->done() || in->fail("checksum", "must be the last line");
        if (words[0] != "array") return in->fail("", "unknown record " + text::quote(words[0]));
        if (!read_array(in, words, out)) return false;
    }
}

std::string sizes_of(const LayerShape& l) {
    return std::to_string(l.heads) + " " + std::to_string(l.kv_heads) + " " + std::to_string(l.key_dim) + " " +
           std::to_string(l.value_dim);
}

Status refuse(const Calibration& c, const std::string& what) {
    return Status(StatusCode::invalid_argument, "calibration file " + text::quote(c.path) + ": " + what);
}

} // namespace

void Calibration::describe(const ModelShape& shape) {
    fingerprint = shape.fingerprint.empty() ? "unknown" : shape.fingerprint;
    layers = shape.layers;
}

void Calibration::add(std::string name, int32_t layer, int32_t head, Side side, std::vector<float> values) {
    arrays.push_back({std::move(name), layer, head, side, std::move(values)});
}

const std::vector<float>* Calibration::find(std::string_view name, int32_t layer, int32_t head, Side side) const {
    for (const CalibrationArray& a : arrays)
        if (a.layer == layer && a.head == head && a.side == side && a.name == name) return &a.values;
    return nullptr;
}

Status Calibration::wrong(std::string_view name, int32_t layer, int32_t head, Side side,
                          const std::string& what) const {
    return refuse(*this, where(name, layer, head, side) + " " + what);
}

Result<const std::vector<float>*> Calibration::need(std::string_view name, int32_t layer, int32_t head, Side side,
                                                    int64_t count) const {
    const std::vector<float>* values = find(name, layer, head, side);
    if (values == nullptr) return wrong(name, layer, head, side, "is missing");
    if (int64_t(values->size()) != count)
        return wrong(name, layer, head, side,
                     "has " + std::to_string(values->size()) + " values, must have " + std::to_string(count));
    return values;
}

Status Calibration::fits(std::string_view wanted) const {
    if (method == wanted) return Status();
    return refuse(*this, "method is " + text::quote(method) + ", must be " + text::quote(wanted));
}

Status Calibration::fits(const ModelShape& shape) const {
    if (!shape.fingerprint.empty() && fingerprint != "unknown" && fingerprint != shape.fingerprint)
        return refuse(*this, "model is " + text::quote(fingerprint) + ", must be that of " + text::quote(shape.name) +
                                 ", " + text::quote(shape.fingerprint) + ": it was made for other weights");
    if (layers.size() != shape.layers.size())
        return refuse(*this, "layers is " + std::to_string(layers.size()) + ", must be the model's " +
                                 std::to_string(shape.layers.size()));
    for (size_t i = 0; i < layers.size(); ++i)
        if (!layers[i].same_sizes(shape.layers[i]))
            return refuse(*this, "layer " + std::to_string(i) + " has the sizes " + sizes_of(layers[i]) +
                                     ", must have the model's " + sizes_of(shape.layers[i]) +
                                     " (query heads, KV heads, key and value head size)");
    return Status();
}

Result<Calibration> read_calibration(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return Status(StatusCode::not_found, "calibration file " + text::quote(path) + ": cannot be opened");
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (file.bad()) return Status(StatusCode::not_found, "calibration file " + text::quote(path) + ": cannot be read");
    Calibration calibration;
    calibration.path = path;
    Reader reader(path, bytes);
    if (!read_records(&reader, bytes, &calibration)) {
        return Status(reader.status().code(), "calibration file " + reader.status().message());
    }
    return calibration;
}

Status write_calibration(const std::string& path, const Calibration& c) {
    Calibration named = c;
    named.path = path;
    if (!is_word(c.method)) return refuse(named, "method " + text::quote(c.method) + " is not a name");
    if (!is_line(c.fingerprint) || c.fingerprint.find(' ') != std::string::npos)
        return refuse(named, "model must be one word");
    if (!is_line(c.text)) return refuse(named, "text must be one line");
    if (c.layers.empty()) return refuse(named, "layers must be at least 1");
    std::string out = std::string(kMagic) + " " + std::to_string(kVersion) + "\nmethod " + c.method + "\nmodel " +
                      c.fingerprint + "\nlayers " + std::to_string(c.layers.size()) + "\n";
    for (size_t i = 0; i < c.layers.size(); ++i)
        out += "layer " + std::to_string(i) + " " + sizes_of(c.layers[i]) + "\n";
    out += "tokens " + std::to_string(c.tokens) + "\ntext " + c.text + "\n";
    for (const CalibrationArray& a : c.arrays) {
        if (!is_word(a.name)) return refuse(named, "array name " + text::quote(a.name) + " is not a word");
        out += "array " + a.name + " " + std::to_string(a.layer) + " " + std::to_string(a.head) + " " +
               name_of(a.side) + " " + std::to_string(a.values.size());
        for (const float x : a.values) {
            if (!std::isfinite(x)) return named.wrong(a.name, a.layer, a.head, a.side, "holds a value not finite");
            out += " " + print_value(x);
        }
        out += "\n";
    }
    out += "checksum " + hex16(fnv1a(out.data(), out.size())) + "\n";

    const std::string part = path + "." + hex16(uint64_t(std::chrono::steady_clock::now().time_since_epoch().count()));
    std::ofstream file(part, std::ios::binary | std::ios::trunc);
    file << out;
    file.close();
    if (!file || std::rename(part.c_str(), path.c_str()) != 0) {
        (void)std::remove(part.c_str());
        return Status(StatusCode::not_found, "calibration file " + text::quote(path) + ": cannot be written");
    }
    return Status();
}

} // namespace kvmosaic
