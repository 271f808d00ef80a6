#include "eval/capture.h"

#include <algorithm>

#include <fmt/format.h>

namespace kvmosaic::eval {

namespace {

// Memory is taken before the model runs: a probe must not fail.
class Collector {
public:
    Collector(Capture* out, const CaptureOptions& options, int64_t rows) : out_(out), options_(options) {
        out->layers.resize(out->shape.layers.size());
        for (size_t il = 0; il < out->layers.size(); ++il) {
            const LayerShape& l = out->shape.layers[il];
            const auto& wanted = options.layers;
            const bool kept = wanted.empty() || std::find(wanted.begin(), wanted.end(), int32_t(il)) != wanted.end();
            if (!l.has_kv() || !kept) continue;
            if (options.query) out->layers[il].q.reserve(size_t(rows * l.heads * l.key_dim));
            out->layers[il].k.reserve(size_t(rows * l.kv_heads * l.key_dim));
            out->layers[il].v.reserve(size_t(rows * l.kv_heads * l.value_dim));
        }
    }
    void begin(int32_t position) { position_ = position; }
    void see(int32_t layer, int64_t rows, const RowsF32& q, const RowsF32& k, const RowsF32& v) {
        CapturedLayer& to = out_->layers[size_t(layer)];
        const LayerShape& l = out_->shape.layers[size_t(layer)];
        for (int64_t row = 0; row < rows; ++row) {
            if (position_ + row < options_.skip) continue;
            add(q, row, l.heads, l.key_dim, &to.q);
            add(k, row, l.kv_heads, l.key_dim, &to.k);
            add(v, row, l.kv_heads, l.value_dim, &to.v);
        }
    }

private:
    static void add(const RowsF32& rows, int64_t row, int32_t heads, int32_t dim, std::vector<float>* to) {
        if (to->capacity() < to->size() + size_t(heads) * size_t(dim)) return; // not wanted
        for (int32_t h = 0; h < heads; ++h)
            to->insert(to->end(), rows.at(row, h), rows.at(row, h) + dim);
    }
    Capture* out_;
    const CaptureOptions& options_;
    int32_t position_ = 0;
};

} // namespace

std::vector<float> Capture::keys_before_rotation(int32_t layer) const {
    const LayerShape& l = shape.layers[size_t(layer)];
    std::vector<float> keys = layers[size_t(layer)].k;
    for (int64_t row = 0; row < rows; ++row) {
        for (int32_t h = 0; h < l.kv_heads; ++h)
            l.rope.turn(keys.data() + (row * l.kv_heads + h) * l.key_dim, -double(positions[size_t(row)]));
    }
    return keys;
}

Result<Capture> capture(const Model& model, const std::vector<int32_t>& text, const CaptureOptions& options,
                        const Progress& progress) {
    const auto wrong = [](const std::string& words) { return Status(StatusCode::invalid_argument, words); };
    const int32_t trained = model.trained_context();
    if (options.window < 64 || (trained > 0 && options.window > trained)) {
        return wrong(fmt::format("--window {}: 64 to {} tokens are possible with this model", options.window, trained));
    }
    if (options.tokens < 64 || options.tokens > int64_t(text.size())) {
        return wrong(fmt::format("--tokens {}: 64 to {}, which the text has", options.tokens, text.size()));
    }
    constexpr int32_t kStep = 256;
    Capture out;
    Collector* collector = nullptr;
    ContextOptions wish;
    wish.context = options.window;
    wish.ubatch = std::min(options.window, kStep);
    wish.threads = options.threads;
    wish.probe = [&collector](int32_t layer, int64_t rows, RowsF32 q, RowsF32 k, RowsF32 v) {
        if (collector) collector->see(layer, rows, q, k, v);
    };
    Result<Context> context = Context::make(model, wish);
    if (!context) return context.status();
    out.shape = context->cache()->shape();
    Collector own(&out, options, options.tokens);
    collector = &own;
    for (int64_t first = 0; first < options.tokens; first += options.window) {
        context->clear();
        const int32_t size = int32_t(std::min<int64_t>(options.window, options.tokens - first));
        for (int32_t at = 0; at < size; at += wish.ubatch) {
            std::vector<int32_t> step(text.begin() + first + at,
                                      text.begin() + first + std::min(size, at + wish.ubatch));
            if (at == 0 && model.begins_with_token()) step[0] = model.begin_token();
            own.begin(at);
            if (Status bad = context->decode(step); !bad) return bad;
            for (size_t i = 0; i < step.size(); ++i) {
                if (at + int32_t(i) >= options.skip) out.positions.push_back(at + int32_t(i));
            }
            if (progress) progress("reading the text", double(first + at) / double(options.tokens));
        }
    }
    out.rows = int64_t(out.positions.size());
    for (size_t il = 0; il < out.layers.size(); ++il) {
        const LayerShape& l = out.shape.layers[il];
        const size_t want = out.layers[il].k.empty() ? 0 : size_t(out.rows * l.kv_heads * l.key_dim);
        if (out.layers[il].k.size() != want || (l.has_kv() && options.layers.empty() && want == 0)) {
            return Status(StatusCode::unsupported,
                          fmt::format("layer {} of this model gave {} key values in place of {}", il,
                                      out.layers[il].k.size(), want));
        }
    }
    return out;
}

} // namespace kvmosaic::eval
