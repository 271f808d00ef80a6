// libllama's memory interface on top of a Cache. Internal to src/llama.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvmosaic/cache.h"
#include "llama/maker.h"
#include "llama/probe.h"

#include "llama-arch.h"
#include "llama-batch.h"
#include "llama-cparams.h"
#include "llama-hparams.h"
#include "llama-memory.h"
#include "llama-model.h"

namespace kvmosaic::seam {

// Sizes, name and fingerprint; no rotation, which depends on a context.
ModelShape shape_from(const llama_model& model);

// FNV-1a (64 bits) over the F32 weights of all norms, by name: the same for every quantization of a model, since
// those are never quantized. Empty when there are none at hand.
std::string fingerprint_of(const llama_model& model);

struct MemoryOptions {
    std::string spec;
    MethodMaker method; // in place of `spec` where it is set
    CacheOptions cache;
    bool statistics = false; // one line at destruction
    bool check_rope = false;
    Probe probe;             // sees q, k and v of every write; may be empty
    std::vector<Rope> ropes; // [L] as a graph stated them, in place of those from the model's parameters; or empty
};

class Memory final : public llama_memory_i {
public:
    // `share_from` maps a layer without own K/V to the layer that it reads; may be empty.
    static Result<std::unique_ptr<Memory>> create(const llama_model& model, const llama_cparams& cparams,
                                                  const MemoryOptions& options,
                                                  const std::function<int32_t(int32_t)>& share_from);
    ~Memory() override;

    Cache& cache() const { return *cache_; }
    const llama_hparams& hparams() const { return hparams_; }
    bool check_rope() const { return options_.check_rope; }
    int32_t owner_of(int32_t layer) const { return owners_[size_t(layer)]; } // whose K/V a layer reads; -1: nobody's
    const Rope& rope(int32_t layer) const { return ropes_[size_t(layer)]; }  // as the graph states it
    // Keeps what a graph says. False when the method looks at rotations and was promised another one.
    bool state_rope(int32_t layer, Rope rope);
    bool promised_wrong() const { return promised_wrong_; } // state_rope has been false
    const std::vector<Rope>& ropes() const { return ropes_; }
    const Probe& probe() const { return options_.probe; }
    void note_gap(float gap);
    float gap() const { return gap_.load(); }
    Status begin(const llama_ubatch& ubatch); // opens the step of one ubatch

    // ---- llama_memory_i ----
    llama_memory_context_ptr init_batch(llama_batch_allocr& balloc, uint32_t n_ubatch, bool embd_all) override;
    llama_memory_context_ptr init_full() override;
    llama_memory_context_ptr init_update(llama_context* context, bool optimize) override;
    bool get_can_shift() const override; // whether every layer's rotation is known as its graph states it
    void clear(bool data) override;
    bool seq_rm(llama_seq_id id, llama_pos p0, llama_pos p1) override;
    void seq_cp(llama_seq_id from, llama_seq_id to, llama_pos p0, llama_pos p1) override;
    void seq_keep(llama_seq_id id) override;
    void seq_add(llama_seq_id id, llama_pos p0, llama_pos p1, llama_pos shift) override;
    void seq_div(llama_seq_id id, llama_pos p0, llama_pos p1, int d) override;
    llama_pos seq_pos_min(llama_seq_id id) const override;
    llama_pos seq_pos_max(llama_seq_id id) const override;
    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const override;
    void state_write(llama_io_write_i& io, llama_seq_id id, llama_state_seq_flags flags) const override;
    void state_read(llama_io_read_i& io, llama_seq_id id, llama_state_seq_flags flags) override;

private:
    Memory(const llama_model& model, const llama_cparams& cparams, const MemoryOptions& options);

    // Half-open interval of rows whose positions lie in [p0, p1); a negative bound is open.
    struct Range {
        int64_t first = 0, last = 0, rows = 0;
        bool empty() const { return first >= last; }
        bool whole() const { return first == 0 && last == rows; }
        bool tail() const { return last == rows; }
    };
    Range range(llama_seq_id id, llama_pos p0, llama_pos p1) const;
    // Rows [p0, p1) of the sequences go to positions that `moved` tells.
    void move_rows(llama_seq_id id, llama_pos p0, llama_pos p1, const std::function<int64_t(int64_t)>& moved);
    std::vector<llama_seq_id> which(llama_seq_id id) const; // one, or all when negative
    Status check_batch(const std::vector<llama_ubatch>& parts, int64_t tokens) const;
    static std::vector<StepRow> step_rows(const llama_ubatch& ubatch);
    int64_t planned_bytes() const;

    const llama_hparams& hparams_;
    const llama_cparams& cparams_; // of the context that owns this memory; its switches change at run time
    const llm_arch arch_;
    const MemoryOptions options_;
    std::unique_ptr<Cache> cache_;
    std::vector<int32_t> owners_; // [L]
    std::vector<Rope> ropes_;     // [L]
    bool uses_rope_ = false, promised_wrong_ = false;
    std::atomic<float> gap_{0.0f};
    int64_t steps_ = 0, tokens_ = 0;
};

// The ubatches of one llama_decode, or a whole cache for graphs that are only measured.
class StepContext final : public llama_memory_context_i {
public:
    StepContext(Memory* memory, llama_memory_status status, std::vector<llama_ubatch> ubatches = {})
        : memory_(memory), status_(status), ubatches_(std::move(ubatches)) {}

    bool next() override { return ++current_ < ubatches_.size(); }
    bool apply() override;
    const llama_ubatch& get_ubatch() const override { return ubatches_[current_]; }
    llama_memory_status get_status() const override { return status_; }
    Memory* memory() const { return memory_; }

private:
    Memory* memory_;
    llama_memory_status status_;
    std::vector<llama_ubatch> ubatches_;
    size_t current_ = 0;
};

} // namespace kvmosaic::seam
