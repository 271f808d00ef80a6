// Drives the public cache over the rows of a case file and writes what its pages hold, channel by channel, for
// check.py to compare with the NumPy reference.
//
//   method_dump CASE OUT
//
// A case is lines of text up to `end`, then little-endian binary: positions i32 [T], q f32 [T][H][Dk], k [T][G][Dk],
// v [T][G][Dv].
//   spec SPEC | layers L LAYER | shape H G DK DV | rows T | steps N N ...  (0: all rows at once)
//   rope ROTARY HALVES BASE FREQ_SCALE EXT ATTN BETA_FAST BETA_SLOW CONTEXT N FACTOR ...
// All layers get the same rows; LAYER is written out. OUT is a run of sections, for each step size: a line
// `NAME|TYPE|ROWS|COLUMNS` and the elements.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "kvmosaic/cache.h"

using namespace kvmosaic;

namespace {

struct Case {
    std::string spec;
    int32_t layers = 1, layer = 0, rows = 0;
    LayerShape shape;
    std::vector<int32_t> steps, positions;
    std::vector<float> q, k, v; // [T][H or G][D]
};

template <typename T>
bool read_array(std::istream& in, size_t n, std::vector<T>* out) {
    out->resize(n);
    return bool(in.read(reinterpret_cast<char*>(out->data()), std::streamsize(n * sizeof(T))));
}

bool read_case(const char* path, Case* c) {
    std::ifstream in(path, std::ios::binary);
    std::string line;
    while (std::getline(in, line) && line != "end") {
        std::istringstream words(line);
        std::string key;
        words >> key;
        if (key == "spec") {
            words >> c->spec;
        } else if (key == "layers") {
            words >> c->layers >> c->layer;
        } else if (key == "shape") {
            words >> c->shape.heads >> c->shape.kv_heads >> c->shape.key_dim >> c->shape.value_dim;
        } else if (key == "rows") {
            words >> c->rows;
        } else if (key == "steps") {
            for (int32_t n = 0; words >> n;)
                c->steps.push_back(n);
            words.clear();
        } else if (key == "rope") {
            Rope& r = c->shape.rope;
            int halves = 0;
            size_t n = 0;
            words >> r.rotary >> halves >> r.base >> r.freq_scale >> r.ext_factor >> r.attn_factor >> r.beta_fast >>
                r.beta_slow >> r.original_context >> n;
            r.known = true;
            r.halves = halves != 0;
            r.factors.resize(n);
            for (float& f : r.factors)
                words >> f;
        } else {
            std::cerr << path << ": unknown line '" << line << "'\n";
            return false;
        }
        if (!words) {
            std::cerr << path << ": cannot read '" << line << "'\n";
            return false;
        }
    }
    const LayerShape& s = c->shape;
    const size_t t = size_t(c->rows);
    const bool whole = read_array(in, t, &c->positions) && read_array(in, t * size_t(s.heads * s.key_dim), &c->q) &&
                       read_array(in, t * size_t(s.kv_heads * s.key_dim), &c->k) &&
                       read_array(in, t * size_t(s.kv_heads * s.value_dim), &c->v);
    if (!whole) std::cerr << path << ": cut short\n";
    return whole;
}

class Out {
public:
    explicit Out(const char* path) : file_(path, std::ios::binary) {}
    bool close() {
        file_.close();
        return bool(file_);
    }
    template <typename T>
    void section(const std::string& name, const char* type, const std::vector<T>& x, size_t columns) {
        file_ << name << '|' << type << '|' << (columns ? x.size() / columns : 0) << '|' << columns << '\n';
        file_.write(reinterpret_cast<const char*>(x.data()), std::streamsize(x.size() * sizeof(T)));
    }
    void bits(const std::string& name, const std::vector<uint16_t>& x, size_t columns) {
        section(name, "u2", x, columns);
    }
    void integers(const std::string& name, const std::vector<int64_t>& x, size_t columns) {
        section(name, "i8", x, columns);
    }
    void floats(const std::string& name, const std::vector<float>& x, size_t columns) {
        section(name, "f4", x, columns);
    }

private:
    std::ofstream file_;
};

uint16_t read_u16(const uint8_t* at) { return uint16_t(at[0] | at[1] << 8); }

// What one page holds, by the layout's own arithmetic.
class PageReader {
public:
    explicit PageReader(const PageView& view) : l_(*view.layout), b_(view.bytes), rows_(size_t(view.rows)) {}

    void write(const std::string& where, Out& out) const {
        const size_t dim = l_.dim;
        std::vector<int64_t> map = channel_map();
        if (l_.kind == StoreKind::tiered) out.integers(where + " ladder", ladder(), 2);
        if (l_.map_bytes) out.integers(where + " map", map, map.size());
        if (in_planes(l_.rule)) return write_planes(where, map, out);
        std::vector<uint16_t> codes(rows_ * dim);
        // Groups of tokens: [groups][D]; groups of channels: [rows][groups].
        const bool token_groups = (l_.side == Side::key) != l_.along_depth;
        const size_t groups = token_groups ? (rows_ + l_.group - 1) / l_.group : l_.groups;
        const size_t columns = token_groups ? dim : groups;
        std::vector<uint16_t> scale((token_groups ? groups : rows_) * columns), offset(scale.size());
        for (size_t row = 0; row < rows_; ++row) {
            for (size_t p = 0; p < dim; ++p) { // ladder position of a key, channel of a value
                const size_t channel = size_t(map[p]);
                codes[row * dim + channel] = code(row, p);
                const int64_t column = parameter(row, p);
                if (column < 0) continue;
                const size_t g = size_t(l_.group_at(int32_t(token_groups ? row : channel)));
                const size_t to = token_groups ? g * columns + channel : row * columns + g;
                if (l_.has_scales()) scale[to] = stored(l_.scale_offset, column);
                if (l_.has_offsets()) offset[to] = stored(l_.zero_offset, column);
            }
        }
        out.bits(where + " codes", codes, dim);
        if (l_.has_scales()) out.bits(where + " scale", scale, columns);
        if (l_.has_offsets()) out.bits(where + " offset", offset, columns);
        if (l_.outliers) {
            std::vector<uint16_t> channels, values;
            for (size_t i = 0; i < rows_ * l_.outliers; ++i) {
                channels.push_back(read_u16(b_ + l_.outlier_offset + 4 * i));
                values.push_back(read_u16(b_ + l_.outlier_offset + 4 * i + 2));
            }
            out.bits(where + " outlier channels", channels, l_.outliers);
            out.bits(where + " outlier values", values, l_.outliers);
        }
    }

private:
    // Pages in planes: logarithms as `scale`, offsets and units as stored.
    void write_planes(const std::string& where, const std::vector<int64_t>& map, Out& out) const {
        const size_t dim = l_.dim;
        const bool key = l_.side == Side::key;
        std::vector<uint16_t> codes(rows_ * dim), scale(key ? dim : rows_), offset(dim), units;
        for (size_t p = 0; p < dim; ++p) {
            const size_t channel = size_t(map[p]);
            for (size_t row = 0; row < rows_; ++row)
                codes[row * dim + channel] = plane_code(key ? row : p, key ? p : row);
            if (key) scale[channel] = b_[l_.scale_offset + p];
            offset[channel] = uint16_t(int8_t(b_[l_.zero_offset + p]));
        }
        for (size_t row = 0; !key && row < rows_; ++row)
            scale[row] = b_[l_.scale_offset + row];
        for (size_t i = 0; i < (key ? 1 : 2); ++i)
            units.push_back(read_u16(b_ + l_.unit_offset + 2 * i));
        out.bits(where + " codes", codes, dim);
        out.bits(where + " scale", scale, key ? dim : 1);
        out.bits(where + " offset", offset, dim);
        out.bits(where + " units", units, units.size());
    }
    uint16_t plane_code(size_t lane, size_t depth) const {
        int bits = 0;
        if (l_.side == Side::value) {
            bits = l_.tiers[0].bits + (lane < l_.wide ? 1 : 0);
        } else if (const TierLayout* t = tier(depth)) {
            bits = t->bits;
        }
        unsigned code = 0;
        for (int i = 0; i < l_.plane_count; ++i) {
            const PlaneLayout& plane = l_.planes[size_t(i)];
            const int shift = plane_shift(plane.role, bits);
            const size_t block = lane / 8, width = size_t(width_of(plane.role)), vector = 32 / width;
            if (shift < 0 || block < plane.block_first || block >= size_t(plane.block_first) + plane.block_count ||
                depth < plane.first || depth >= size_t(plane.first) + plane.live)
                continue;
            const size_t at = depth - plane.first;
            const uint8_t byte = b_[plane.offset + (block - plane.block_first) * plane.stride + at / vector * 32 +
                                    4 * (lane % 8) + at % 4];
            code |= (unsigned(byte) >> width * (at % vector / 4) & ((1u << width) - 1)) << shift;
        }
        return uint16_t(code);
    }
    std::vector<int64_t> channel_map() const {
        std::vector<int64_t> map;
        for (size_t p = 0; p < l_.dim; ++p) {
            if (!l_.map_bytes) {
                map.push_back(int64_t(p));
            } else {
                map.push_back(l_.dim > 256 ? read_u16(b_ + l_.map_offset + 2 * p) : b_[l_.map_offset + p]);
            }
        }
        return map;
    }
    std::vector<int64_t> ladder() const {
        std::vector<int64_t> pairs;
        const auto push = [&](int64_t bits, int64_t channels) {
            pairs.push_back(bits);
            pairs.push_back(channels);
        };
        if (l_.raw_depth) push(16, l_.raw_depth);
        for (int i = 0; i < l_.tier_count; ++i)
            push(l_.tiers[size_t(i)].bits, l_.tiers[size_t(i)].live);
        if (l_.zero_bits) push(0, l_.zero_bits);
        return pairs;
    }
    // The coded tier of a depth position, or null.
    const TierLayout* tier(size_t depth) const {
        for (int i = 0; i < l_.tier_count; ++i) {
            const TierLayout& t = l_.tiers[size_t(i)];
            if (depth >= t.first && depth < size_t(t.first) + t.live) return &t;
        }
        return nullptr;
    }
    uint16_t code(size_t row, size_t p) const {
        const size_t lane = l_.side == Side::key ? row : p, depth = l_.side == Side::key ? p : row;
        if (depth < l_.raw_depth) return read_u16(b_ + l_.raw_offset + 2 * (depth * l_.lanes + lane));
        const TierLayout* t = tier(depth);
        if (!t) return 0;
        const size_t pos = depth - t->first;
        if (l_.levels == 3) {
            unsigned five = b_[lane / 8 * l_.lane_block_bytes + t->offset + pos / 5 * 8 + lane % 8];
            for (size_t i = 0; i < pos % 5; ++i)
                five /= 3;
            return uint16_t(five % 3);
        }
        CodeSite sites[2];
        const int n = code_sites(l_, *t, int32_t(lane), int32_t(pos), sites);
        unsigned value = 0;
        for (int i = 0; i < n; ++i)
            value |= unsigned(b_[sites[i].byte] >> sites[i].shift & ((1 << sites[i].width) - 1)) << sites[i].weight;
        return uint16_t(value);
    }
    // Index into the arrays of scales and offsets, or -1 for 16-bit channels.
    int64_t parameter(size_t row, size_t p) const {
        const size_t lane = l_.side == Side::key ? row : p, depth = l_.side == Side::key ? p : row;
        if (l_.along_depth) return int64_t(l_.group_at(int32_t(depth))) * l_.columns + int64_t(lane);
        const int64_t base = int64_t(l_.group_at(int32_t(lane))) * l_.columns;
        if (depth < l_.raw_depth) return -1;
        if (const TierLayout* t = tier(depth)) return base + t->param_first + int64_t(depth) - t->first;
        return base + l_.columns - l_.zero_bits + int64_t(depth) - (l_.depth - l_.zero_bits);
    }
    uint16_t stored(uint32_t offset, int64_t i) const {
        const uint32_t size = bytes_of(l_.params);
        const uint8_t* at = b_ + offset + size * uint32_t(i);
        return size == 1 ? *at : read_u16(at);
    }

    const PageLayout& l_;
    const uint8_t* b_;
    size_t rows_;
};

void write_side(const Case& c, const Cache& cache, int32_t head, Side side, Out& out) {
    const std::string where = std::string(name_of(side)) + ' ' + std::to_string(head);
    const SidePlan& plan = cache.plan(0, c.layer, head, side);
    const int64_t packed = cache.packed_rows(0, c.layer, side);
    const auto wide = [](const std::vector<uint16_t>& x) { return std::vector<int64_t>(x.begin(), x.end()); };
    out.integers(where + " packed", {plan.window.front, packed}, 2);
    if (packed) {
        const Transform& t = plan.transform;
        if (!t.shift.empty()) out.floats(where + " shift", t.shift, t.shift.size());
        if (!t.scale.empty()) out.floats(where + " scale", t.scale, t.scale.size());
        if (!plan.mean.empty()) out.floats(where + " mean", plan.mean, plan.mean.size());
        if (!t.order.empty()) out.integers(where + " order", wide(t.order), t.order.size());
        out.integers(where + " pinned", wide(plan.pinned), plan.pinned.size());
        for (int64_t n = 0; n < cache.pages(0, c.layer, side); ++n)
            PageReader(cache.page(0, c.layer, head, side, n)).write(where + " page " + std::to_string(n), out);
    }
    const size_t dim = size_t(c.shape.dim(side));
    std::vector<float> rows(size_t(c.rows) * dim);
    cache.decode(0, c.layer, head, side, 0, c.rows, rows.data());
    out.floats(where + " decoded", rows, dim);
}

// All rows in steps of `size`, then everything that the cache holds, and what the last row's attention gave.
bool run(const Case& c, int32_t size, Out& out) {
    ModelShape shape;
    shape.name = "case";
    shape.layers.assign(size_t(c.layers), c.shape);
    CacheOptions options;
    options.poison = true;
    auto made = Cache::create(shape, c.spec, options);
    if (!made.ok()) {
        std::cerr << c.spec << ": " << made.status().message() << '\n';
        return false;
    }
    Cache& cache = **made;
    const LayerShape& s = c.shape;
    const SeqId seq = 0;
    const size_t out_row = size_t(s.heads * s.value_dim);
    std::vector<float> attention(size_t(c.rows) * out_row);
    AttendArgs args;
    args.scale = 1.0f / std::sqrt(float(s.key_dim));
    for (int32_t at = 0, n = 0; at < c.rows; at += n) {
        n = size > 0 ? std::min(size, c.rows - at) : c.rows;
        std::vector<StepRow> rows;
        for (int32_t t = at; t < at + n; ++t)
            rows.push_back({c.positions[size_t(t)], std::span<const SeqId>(&seq, 1)});
        const RowsF32 q{c.q.data() + int64_t(at) * s.heads * s.key_dim, int64_t(s.heads) * s.key_dim, s.key_dim};
        const RowsF32 k{c.k.data() + int64_t(at) * s.kv_heads * s.key_dim, int64_t(s.kv_heads) * s.key_dim, s.key_dim};
        const RowsF32 v{c.v.data() + int64_t(at) * s.kv_heads * s.value_dim, int64_t(s.kv_heads) * s.value_dim,
                        s.value_dim};
        const Status status = cache.begin_step(rows);
        if (!status.ok()) {
            std::cerr << c.spec << ": " << status.message() << '\n';
            return false;
        }
        for (int32_t layer = 0; layer < c.layers; ++layer) {
            cache.write(layer, q, k, v);
            cache.attend(layer, q, args, attention.data() + size_t(at) * out_row);
        }
    }
    cache.end_step();
    out.section("step", "i4", std::vector<int32_t>{size}, 1);
    for (const Side side : {Side::key, Side::value})
        for (int32_t head = 0; head < s.kv_heads; ++head)
            write_side(c, cache, head, side, out);
    const size_t last = c.layer == c.layers - 1 && c.rows > 0 ? size_t(c.rows - 1) * out_row : attention.size();
    out.floats("attention", std::vector<float>(attention.begin() + int64_t(last), attention.end()),
               size_t(s.value_dim));
    const Footprint f = cache.footprint();
    out.integers("footprint",
                 {f.values[0], f.values[1], f.packed[0], f.packed[1], f.raw[0], f.raw[1], f.tables, f.statistics,
                  f.reserved, f.non_finite, f.saturated},
                 11);
    return true;
}

} // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::cerr << "usage: method_dump CASE OUT\n";
        return 2;
    }
    Case c;
    if (!read_case(argv[1], &c)) return 1;
    Out out(argv[2]);
    for (const int32_t size : c.steps)
        if (!run(c, size, out)) return 1;
    if (!out.close()) {
        std::cerr << argv[2] << ": cannot write\n";
        return 1;
    }
    return 0;
}
