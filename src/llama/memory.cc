#include "llama/memory.h"

#include <algorithm>
#include <cstdio>
#include <new>

#include "kvmosaic/method.h"
#include "llama/rope.h"

#include "ggml-backend.h"
#include "llama-impl.h"

namespace kvmosaic::seam {

ModelShape shape_from(const llama_model& model) {
    const llama_hparams& hparams = model.hparams;
    ModelShape shape;
    shape.name = llm_arch_name(model.arch);
    shape.fingerprint = fingerprint_of(model);
    shape.layers.resize(hparams.n_layer_all);
    // layers behind the trunk predict further tokens in a context of their own; a router layer is part of the trunk
    const bool trunk_only = hparams.n_layer_nextn > 0 && hparams.n_layer() > 0 && hparams.router_layer < 0;
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        LayerShape& layer = shape.layers[il];
        layer.heads = int32_t(hparams.n_head(il));
        layer.key_dim = int32_t(hparams.n_embd_head_k(il));
        layer.value_dim = int32_t(hparams.n_embd_head_v(il));
        if (hparams.has_kv(il) && !(trunk_only && il >= hparams.n_layer())) {
            layer.kv_heads = int32_t(hparams.n_head_kv(il));
        }
    }
    return shape;
}

Memory::Memory(const llama_model& model, const llama_cparams& cparams, const MemoryOptions& options)
    : hparams_(model.hparams), cparams_(cparams), arch_(model.arch), options_(options),
      ropes_(model.hparams.n_layer_all) {}

Result<std::unique_ptr<Memory>> Memory::create(const llama_model& model, const llama_cparams& cparams,
                                               const MemoryOptions& options,
                                               const std::function<int32_t(int32_t)>& share_from) {
    std::unique_ptr<Memory> memory(new Memory(model, cparams, options));
    ModelShape shape = shape_from(model);
    for (size_t il = 0; il < shape.layers.size(); ++il) {
        if (!shape.layers[il].has_kv()) continue;
        shape.layers[il].rope =
            options.ropes.empty() ? rope_of_parameters(model, cparams, int32_t(il)) : options.ropes[il];
    }
    CacheOptions cache_options = options.cache;
    if (cache_options.max_rows == 0) cache_options.max_rows = int64_t(cparams.n_ctx_seq);
    auto made = options.method ? options.method() : open_method(options.spec);
    if (!made) return made.status();
    auto cache = Cache::create(shape, std::move(*made), cache_options);
    if (!cache) return cache.status();
    memory->cache_ = std::move(*cache);
    const Method& method = memory->cache_->method();
    memory->uses_rope_ = method.info().query_sum == QuerySum::pair_norm;
    for (size_t il = 0; il < shape.layers.size(); ++il) {
        if (!shape.layers[il].has_kv()) continue;
        const SidePlan plan = method.initial(Side::key, int32_t(il), 0, shape.layers[il].key_dim);
        if (plan.space != KeySpace::post_rope) memory->uses_rope_ = true;
    }
    memory->owners_.resize(shape.layers.size(), -1);
    for (size_t il = 0; il < shape.layers.size(); ++il) {
        if (shape.layers[il].has_kv()) {
            memory->owners_[il] = int32_t(il);
        } else if (share_from) {
            memory->owners_[il] = share_from(int32_t(il));
        }
    }
    return memory;
}

Memory::~Memory() {
    if (!options_.statistics || steps_ == 0) return; // tools also make contexts that they only measure
    cache_->end_step();
    const Footprint f = cache_->footprint();
    std::fprintf(stderr,
                 "kvmosaic: spec %s, path %s (%s), %lld steps, %lld rows, %.2f MiB at the end for %lld tokens, "
                 "%.3f true bits per value",
                 cache_->method().spec().c_str(), name_of(cache_->path()), cache_->isa(),
                 static_cast<long long>(steps_), static_cast<long long>(tokens_), double(f.cache_bytes()) / 1048576.0,
                 static_cast<long long>(f.tokens), f.true_bits());
    if (options_.check_rope) std::fprintf(stderr, ", largest rope gap %.3g", double(gap_.load()));
    std::fprintf(stderr, "\n");
}

bool Memory::state_rope(int32_t layer, Rope rope) {
    ropes_[size_t(layer)] = std::move(rope);
    if (!uses_rope_ || same_turn(ropes_[size_t(layer)], cache_->shape().layers[size_t(layer)].rope)) return true;
    promised_wrong_ = true;
    return false;
}

void Memory::note_gap(float gap) {
    float seen = gap_.load();
    while (gap > seen && !gap_.compare_exchange_weak(seen, gap)) {
    }
}

// ---- steps ----

std::vector<StepRow> Memory::step_rows(const llama_ubatch& ubatch) {
    std::vector<StepRow> rows(ubatch.n_tokens);
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        rows[i].position = ubatch.pos[i];
        rows[i].sequences = {ubatch.seq_id[i], size_t(ubatch.n_seq_id[i])};
    }
    return rows;
}

Status Memory::begin(const llama_ubatch& ubatch) {
    const std::vector<StepRow> rows = step_rows(ubatch);
    Status status = cache_->begin_step(rows);
    if (status) {
        ++steps_;
        tokens_ += int64_t(rows.size());
    }
    return status;
}

bool StepContext::apply() {
    if (ubatches_.empty()) return true;
    try {
        const Status status = memory_->begin(ubatches_[current_]);
        if (!status) LLAMA_LOG_ERROR("kvmosaic: %s\n", status.message().c_str());
        return status.ok();
    } catch (const std::bad_alloc&) {
        LLAMA_LOG_ERROR("kvmosaic: out of memory while a step was prepared\n");
        return false;
    }
}

Status Memory::check_batch(const std::vector<llama_ubatch>& parts, int64_t tokens) const {
    if (cparams_.training) return {StatusCode::unsupported, "training is not possible on a compressed cache"};
    if (!cparams_.causal_attn && hparams_.swa_type != LLAMA_SWA_TYPE_NONE) {
        return {StatusCode::unsupported, "non-causal attention with a sliding window is not supported"};
    }
    std::vector<StepRow> rows;
    rows.reserve(size_t(tokens));
    for (const llama_ubatch& part : parts) {
        const std::vector<StepRow> more = step_rows(part);
        rows.insert(rows.end(), more.begin(), more.end());
    }
    if (Status status = cache_->can_append(rows); !status) return status;
    if (!cparams_.kv_unified) return {};
    // One pool for all sequences, as llama.cpp's own cache would have; rows that sequences share count once.
    int64_t held = 0;
    for (const SeqId id : cache_->sequences())
        held += cache_->rows(id);
    if (held + tokens > int64_t(cparams_.n_ctx)) held = cache_->footprint().tokens;
    if (held + tokens > int64_t(cparams_.n_ctx)) {
        return {StatusCode::out_of_capacity, "the context of " + std::to_string(cparams_.n_ctx) + " tokens holds " +
                                                 std::to_string(held) + ", no room for " + std::to_string(tokens)};
    }
    return {};
}

llama_memory_context_ptr Memory::init_batch(llama_batch_allocr& balloc, uint32_t n_ubatch, bool /*embd_all*/) {
    cache_->end_step();
    std::vector<llama_ubatch> parts;
    balloc.split_reset();
    for (;;) {
        llama_ubatch part = balloc.split_simple(n_ubatch);
        if (part.n_tokens == 0) break;
        parts.push_back(std::move(part));
    }
    if (balloc.get_n_used() < balloc.get_n_tokens()) {
        return std::make_unique<StepContext>(this, LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    }
    const Status status = check_batch(parts, balloc.get_n_tokens());
    if (status) return std::make_unique<StepContext>(this, LLAMA_MEMORY_STATUS_SUCCESS, std::move(parts));
    if (status.code() == StatusCode::out_of_capacity) {
        LLAMA_LOG_DEBUG("kvmosaic: %s\n", status.message().c_str());
        return std::make_unique<StepContext>(this, LLAMA_MEMORY_STATUS_FAILED_PREPARE);
    }
    LLAMA_LOG_ERROR("kvmosaic: %s\n", status.message().c_str());
    return std::make_unique<StepContext>(this, LLAMA_MEMORY_STATUS_FAILED_COMPUTE);
}

llama_memory_context_ptr Memory::init_full() {
    return std::make_unique<StepContext>(this, LLAMA_MEMORY_STATUS_SUCCESS);
}

llama_memory_context_ptr Memory::init_update(llama_context* /*context*/, bool /*optimize*/) {
    return std::make_unique<StepContext>(this, LLAMA_MEMORY_STATUS_NO_UPDATE);
}

// ---- sequences ----

std::vector<llama_seq_id> Memory::which(llama_seq_id id) const {
    if (id < 0) return cache_->sequences();
    return cache_->rows(id) > 0 ? std::vector<llama_seq_id>{id} : std::vector<llama_seq_id>{};
}

Memory::Range Memory::range(llama_seq_id id, llama_pos p0, llama_pos p1) const {
    const std::span<const int32_t> positions = cache_->positions(id); // never decreasing
    const auto at = [&](llama_pos p) {
        return int64_t(std::lower_bound(positions.begin(), positions.end(), p) - positions.begin());
    };
    Range r;
    r.rows = int64_t(positions.size());
    r.first = p0 < 0 ? 0 : at(p0);
    r.last = p1 < 0 ? r.rows : at(p1);
    return r;
}

void Memory::clear(bool /*data*/) { cache_->clear(); }

bool Memory::seq_rm(llama_seq_id id, llama_pos p0, llama_pos p1) {
    cache_->end_step();
    for (const llama_seq_id s : which(id)) {
        const Range r = range(s, p0, p1);
        if (r.empty()) continue;
        if (r.whole()) {
            cache_->remove(s);
        } else if (const Status status = cache_->remove_rows(s, r.first, r.last); !status) {
            LLAMA_LOG_ERROR("kvmosaic: sequence %d: %s\n", s, status.message().c_str());
            return false;
        }
    }
    return true;
}

void Memory::seq_cp(llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1) {
    cache_->end_step();
    if (from == to) return;
    const Range r = range(from, p0, p1);
    if (r.empty()) return;
    const Range kept = range(to, p0, p1);
    if (!(kept.rows == 0 || kept.whole())) {
        LLAMA_LOG_ERROR("kvmosaic: cannot copy positions [%d, %d) of sequence %d to sequence %d: it holds others, and "
                        "only a copy that leaves nothing else in its target is possible\n",
                        p0, p1, from, to);
        return;
    }
    Status status = cache_->fork(from, to);
    if (status && r.last < r.rows) status = cache_->truncate(to, r.last);
    if (status && r.first > 0) status = cache_->remove_rows(to, 0, r.first);
    if (!status) {
        cache_->remove(to);
        LLAMA_LOG_ERROR("kvmosaic: copy of sequence %d to %d: %s\n", from, to, status.message().c_str());
    }
}

void Memory::seq_keep(llama_seq_id id) {
    cache_->end_step();
    for (const llama_seq_id s : which(-1)) {
        if (s != id) cache_->remove(s);
    }
}

bool Memory::get_can_shift() const {
    if (!cache_->can_shift()) return false;
    for (size_t il = 0; il < ropes_.size(); ++il) {
        const LayerShape& layer = cache_->shape().layers[il];
        if (layer.has_kv() && !same_turn(ropes_[il], layer.rope)) return false;
    }
    return true;
}

// There is no way to return an error: what cannot be done is logged, and the positions tell callers that it was not.
void Memory::move_rows(llama_seq_id id, llama_pos p0, llama_pos p1, const std::function<int64_t(int64_t)>& moved) {
    cache_->end_step();
    if (!get_can_shift()) {
        LLAMA_LOG_ERROR("kvmosaic: positions [%d, %d) of sequence %d were not moved: the rotation of a layer's keys is "
                        "not known, or not what the model's parameters say\n",
                        p0, p1, id);
        return;
    }
    for (const llama_seq_id s : which(id)) {
        const Range r = range(s, p0, p1);
        if (r.empty()) continue;
        const std::span<const int32_t> now = cache_->positions(s);
        std::vector<int32_t> positions;
        for (int64_t row = r.first; row < r.last; ++row)
            positions.push_back(int32_t(std::clamp<int64_t>(moved(now[size_t(row)]), -1, INT32_MAX)));
        if (const Status status = cache_->reposition(s, r.first, positions); !status)
            LLAMA_LOG_ERROR("kvmosaic: positions [%d, %d) of sequence %d were not moved: %s\n", p0, p1, s,
                            status.message().c_str());
    }
}

void Memory::seq_add(llama_seq_id id, llama_pos p0, llama_pos p1, llama_pos shift) {
    if (shift != 0) move_rows(id, p0, p1, [shift](int64_t p) { return p + shift; });
}

void Memory::seq_div(llama_seq_id id, llama_pos p0, llama_pos p1, int d) {
    if (d > 1) move_rows(id, p0, p1, [d](int64_t p) { return p / d; });
}

llama_pos Memory::seq_pos_min(llama_seq_id id) const {
    const std::span<const int32_t> positions = cache_->positions(id);
    return positions.empty() ? -1 : positions.front();
}

llama_pos Memory::seq_pos_max(llama_seq_id id) const {
    const std::span<const int32_t> positions = cache_->positions(id);
    return positions.empty() ? -1 : positions.back();
}

// ---- size ----

// What a full context will need at most, so that memory fitting sees more than an empty cache.
int64_t Memory::planned_bytes() const {
    const Method& method = cache_->method();
    const int64_t rows = cparams_.n_ctx_seq;
    const int64_t sequences = cparams_.kv_unified ? 1 : int64_t(cparams_.n_seq_max);
    const auto pages_of = [](int64_t n) { return (n + kPageTokens - 1) / kPageTokens; };
    int64_t bytes = rows * int64_t(sizeof(int32_t));
    const ModelShape& shape = cache_->shape();
    for (size_t il = 0; il < shape.layers.size(); ++il) {
        for (int32_t head = 0; head < shape.layers[il].kv_heads; ++head) {
            for (const Side side : {Side::key, Side::value}) {
                const int32_t dim = shape.layers[il].dim(side);
                const SidePlan plan = method.initial(side, int32_t(il), head, dim);
                const int64_t raw_page = raw_layout(plan.raw, side, dim).bytes;
                const int64_t front = std::min<int64_t>(plan.window.front, rows);
                int64_t recent = rows - front;
                if (front > 0) bytes += raw_layout(plan.raw, side, dim, int32_t(front)).bytes;
                if (plan.window.flush > 0) {
                    recent = std::min<int64_t>(recent, plan.window.keep + plan.window.flush + kPageTokens);
                    bytes +=
                        pages_of(rows - front) * int64_t(worst_page_bytes(plan.store, side, dim, method.widths(side)));
                }
                bytes += pages_of(recent) * raw_page;
            }
        }
    }
    return bytes * sequences;
}

std::map<ggml_backend_buffer_type_t, size_t> Memory::memory_breakdown() const {
    return {{ggml_backend_cpu_buffer_type(), size_t(planned_bytes())}};
}

} // namespace kvmosaic::seam
