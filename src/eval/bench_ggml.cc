// ggml's own attention with the mask and precision that llama.cpp gives it.
//
// Two orders of K and V. By default each head's rows lie together, which is the best case for ggml: on a CPU its loop
// over one head then reads memory from front to back. llama.cpp's cache has all heads of a token together (",cells"),
// so that the loop reads a short piece of every token's row; with long rows that costs several times as much.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "ggml-cpu.h"

#include "eval/bench_cpu.h"

namespace kvmosaic::eval {

namespace {

struct Named {
    const char* name;
    ggml_type type;
    bool cells;
};
constexpr Named kTypes[] = {
    {"ggml:f16", GGML_TYPE_F16, false},        {"ggml:bf16", GGML_TYPE_BF16, false},
    {"ggml:q8_0", GGML_TYPE_Q8_0, false},      {"ggml:q4_0", GGML_TYPE_Q4_0, false},
    {"ggml:f16,cells", GGML_TYPE_F16, true},   {"ggml:bf16,cells", GGML_TYPE_BF16, true},
    {"ggml:q8_0,cells", GGML_TYPE_Q8_0, true}, {"ggml:q4_0,cells", GGML_TYPE_Q4_0, true},
};
constexpr int64_t kPadding = 256; // llama.cpp attends a multiple of so many cells, the last ones masked

const Named* find(const std::string& name) {
    for (const Named& t : kTypes)
        if (name == t.name) return &t;
    return nullptr;
}

class GgmlSubject final : public BenchSubject {
public:
    GgmlSubject(const BenchShape& shape, const BenchData& data, GgmlPool& pool, const Named& type)
        : shape_(shape), data_(data), pool_(pool), type_(type.type), by_cell_(type.cells),
          head_bytes_(ggml_row_size(type.type, shape.head_dim)),
          cells_((shape.context + kPadding - 1) / kPadding * kPadding) {}

    Status prepare() {
        row.bytes = 2 * int64_t(head_bytes_) * shape_.kv_heads * shape_.context * shape_.batch;
        sets_.resize(size_t(bench_sets(double(row.bytes), shape_)));
        const size_t tensors = sets_.size() * 12;
        context_.reset(
            ggml_init({tensors * ggml_tensor_overhead() + sets_.size() * ggml_graph_overhead() + 4096, nullptr, true}));
        for (Set& set : sets_)
            build(&set);
        buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), pool_.backend()));
        if (!buffer_) return {StatusCode::out_of_memory, row.spec + ": the system gave no memory for its tensors"};
        q_ = data_.queries(int64_t(shape_.batch) * shape_.query_rows, 2);
        for (size_t i = 0; i < sets_.size(); ++i) {
            std::copy(q_.begin(), q_.end(), static_cast<float*>(sets_[i].q->data));
            if (i == 0) {
                for (const Side side : {Side::key, Side::value})
                    quantize(side, static_cast<uint8_t*>(sets_[0].side[size_t(side)]->data));
                mask(static_cast<ggml_fp16_t*>(sets_[0].mask->data));
                continue;
            }
            for (size_t s = 0; s < 2; ++s)
                std::copy_n(static_cast<const uint8_t*>(sets_[0].side[s]->data), ggml_nbytes(sets_[0].side[s]),
                            static_cast<uint8_t*>(sets_[i].side[s]->data));
            std::copy_n(static_cast<const uint8_t*>(sets_[0].mask->data), ggml_nbytes(sets_[0].mask),
                        static_cast<uint8_t*>(sets_[i].mask->data));
        }
        return {};
    }

    double call() override { return pool_.run(sets_[next_++ % sets_.size()].graph); }

    double error() override {
        pool_.run(sets_[0].graph);
        const auto* got = static_cast<const float*>(sets_[0].out->data);
        return error_of(pool_, shape_, q_.data(), got, [this](Side side, int32_t seq, int32_t head, int64_t rows) {
            return stored(side, seq, head, rows);
        });
    }

private:
    struct Set {
        ggml_tensor *q = nullptr, *mask = nullptr, *out = nullptr;
        ggml_tensor* side[2] = {}; // [D, G, cells, batch] by cell, else [D, cells, G, batch]
        ggml_cgraph* graph = nullptr;
    };

    void build(Set* set) {
        ggml_context* c = context_.get();
        const int64_t dim = shape_.head_dim, heads = shape_.kv_heads, batch = shape_.batch, rows = shape_.query_rows;
        set->q = ggml_new_tensor_4d(c, GGML_TYPE_F32, dim, shape_.heads, rows, batch);
        set->mask = ggml_new_tensor_4d(c, GGML_TYPE_F16, cells_, rows, 1, batch);
        ggml_tensor* view[2];
        for (size_t s = 0; s < 2; ++s) {
            set->side[s] = by_cell_ ? ggml_new_tensor_4d(c, type_, dim, heads, cells_, batch)
                                    : ggml_new_tensor_4d(c, type_, dim, cells_, heads, batch);
            view[s] = by_cell_ ? ggml_permute(c, set->side[s], 0, 2, 1, 3) : set->side[s];
        }
        set->out = ggml_flash_attn_ext(c, ggml_permute(c, set->q, 0, 2, 1, 3), view[0], view[1], set->mask,
                                       shape_.scale(), 0.0f, 0.0f);
        ggml_prec_set_acc(set->out, GGML_PREC_F32);
        set->graph = ggml_new_graph(c);
        ggml_build_forward_expand(set->graph, set->out);
    }

    size_t offset(int32_t seq, int32_t head, int64_t cell) const {
        const int64_t heads = shape_.kv_heads;
        const int64_t at = by_cell_ ? (seq * cells_ + cell) * heads + head : (seq * heads + head) * cells_ + cell;
        return size_t(at) * head_bytes_;
    }

    void quantize(Side side, uint8_t* to) const {
        const int64_t heads = shape_.kv_heads, dim = shape_.head_dim;
        std::vector<float> block(size_t(kBenchBlock * heads * dim));
        std::vector<uint8_t> coded(size_t(kBenchBlock * heads) * head_bytes_);
        for (int32_t seq = 0; seq < shape_.batch; ++seq)
            for (int64_t t = 0; t < cells_; t += kBenchBlock) { // the padding is a multiple of a block
                data_.rows(side, seq, t / kBenchBlock, block.data());
                ggml_quantize_chunk(type_, block.data(), coded.data(), 0, kBenchBlock * heads, dim, nullptr);
                for (int64_t i = 0; i < kBenchBlock * heads; ++i)
                    std::copy_n(coded.data() + size_t(i) * head_bytes_, head_bytes_,
                                to + offset(seq, int32_t(i % heads), t + i / heads));
            }
    }

    void mask(ggml_fp16_t* to) const {
        const ggml_fp16_t open = ggml_fp32_to_fp16(0.0f), shut = ggml_fp32_to_fp16(-INFINITY);
        for (int64_t i = 0; i < int64_t(shape_.batch) * shape_.query_rows; ++i)
            for (int64_t t = 0; t < cells_; ++t)
                *to++ = t <= shape_.context - shape_.query_rows + i % shape_.query_rows ? open : shut;
    }

    std::vector<float> stored(Side side, int32_t seq, int32_t head, int64_t rows) const {
        const int32_t dim = shape_.head_dim;
        const auto* base = static_cast<const uint8_t*>(sets_[0].side[size_t(side)]->data);
        std::vector<float> out(size_t(rows) * size_t(dim));
        for (int64_t t = 0; t < rows; ++t)
            ggml_get_type_traits(type_)->to_float(base + offset(seq, head, t), out.data() + t * dim, dim);
        return out;
    }

    BenchShape shape_;
    const BenchData& data_;
    GgmlPool& pool_;
    ggml_type type_;
    bool by_cell_;
    size_t head_bytes_; // of a head's row
    int64_t cells_;
    ggml_context_ptr context_;
    ggml_backend_buffer_ptr buffer_;
    std::vector<Set> sets_;
    std::vector<float> q_; // [rows][H][D]
    size_t next_ = 0;
};

} // namespace

const std::vector<std::string>& cpu_baselines() {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> all;
        for (const Named& t : kTypes)
            all.emplace_back(t.name);
        return all;
    }();
    return names;
}

Status check_cpu_baseline(const std::string& name, const BenchShape& shape) {
    const Named* type = find(name);
    if (!type)
        return {StatusCode::invalid_argument,
                fmt::format("--baseline {}: one of {}", name, fmt::join(cpu_baselines(), ", "))};
    const int64_t block = ggml_blck_size(type->type);
    if (shape.head_dim % block != 0)
        return {StatusCode::invalid_argument,
                fmt::format("--baseline {}: needs a --head-dim that is a multiple of {}, not {}", name, block,
                            shape.head_dim)};
    return {};
}

Result<std::unique_ptr<BenchSubject>> CpuDevice::baseline(const std::string& name) {
    if (Status st = check_cpu_baseline(name, shape_); !st) return st;
    auto subject = std::make_unique<GgmlSubject>(shape_, data_, pool_, *find(name));
    subject->row.spec = subject->row.baseline = name;
    subject->row.device = "cpu";
    subject->row.path = "ggml";
    if (Status st = subject->prepare(); !st) return st;
    return std::unique_ptr<BenchSubject>(std::move(subject));
}

} // namespace kvmosaic::eval
