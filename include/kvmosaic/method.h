// A method decides; it knows no kernels, memory or backends. Pure: same inputs, same plan.
// One method is one file in src/methods/ and one row in methods.def (docs/adding-a-method.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvmosaic/options.h"
#include "kvmosaic/shape.h"
#include "kvmosaic/status.h"
#include "kvmosaic/store.h"
#include "kvmosaic/transform.h"

namespace kvmosaic {

// Token regions of one side. The first `front` rows stay raw for good. Of the others the newest `keep` stay raw; when
// keep + flush are raw, the oldest `flush` are packed. flush = 0: nothing is ever packed.
struct Window {
    int32_t front = 0; // 0..4096
    int32_t keep = 0;  // 0..65536
    int32_t flush = 0; // 0, or a divisor of kPageTokens
    int32_t first = 0; // nothing is packed before this many rows beyond the front exist: 0, or kPageTokens
    bool operator==(const Window&) const = default;

    // Rows packed (front not counted) once `rows` rows beyond the front exist, starting from `packed` of them.
    int64_t packed_after(int64_t packed, int64_t rows) const {
        if (flush == 0 || rows < first || rows - packed < keep + flush) return packed;
        return packed + (rows - packed - keep) / flush * flush;
    }
};

// In which space keys are packed. Raw rows always stay as they came, after RoPE.
enum class KeySpace : uint8_t {
    post_rope, // as they are attended
    pre_rope,  // turned back by their positions
    centred,   // post-RoPE, minus a mean that turns with the position: k_t - R_t mean
};

// A method's decision for one layer, KV head and side. `store`, `raw`, `window` and `space` are fixed when a cache is
// made. `transform`, `ladder`, `mean` and `pinned` may also be decided once a sequence by `freeze`; `ladder` and
// `channels` at every seal by methods with a tiered store.
struct SidePlan {
    StoreSpec store;            // of packed pages
    RawType raw = RawType::f16; // of front and recent rows; plans and codes are made from these
    Window window;
    Ladder ladder;                  // tiered: widths, widest first
    std::vector<uint16_t> channels; // tiered with page_map: [D] channel at each ladder position, a permutation
    Transform transform;            // basis in which channels are packed
    KeySpace space = KeySpace::post_rope;
    bool raised = false;          // tiered: this page got more bits than asked for (a method's guard)
    std::vector<float> mean;      // [D] values of f16, keys of space `centred`: what `freeze` decides, empty before
    int32_t pins = 0;             // most rows of the first page that `freeze` may keep raw
    std::vector<uint16_t> pinned; // those rows, ascending, counted from the first row beyond the front
};

// Query statistics of one KV head, over the rows of its own sequence up to the row that triggers the seal.
struct QueryStats {
    const float* abs_sum = nullptr; // [D] sum of |q| (or what MethodInfo::query_sum says) over rows and the head's
                                    // query heads, fp32, token then head order
    int64_t count = 0;              // how many q vectors went in
};

struct PlanInput {
    Side side = Side::key;
    int32_t layer = 0, kv_head = 0;
    int64_t block = 0;           // index of the flushed block, from 0
    const float* rows = nullptr; // [count][D] the block's raw rows, as stored; centred keys: minus their mean
    int64_t count = 0;
    int32_t dim = 0;
    QueryStats query;           // key side
    int32_t front = 0;          // freeze: how many of the rows are front rows
    const Rope* rope = nullptr; // of the layer
};

// What is summed up for each channel of the queries.
enum class QuerySum : uint8_t {
    magnitude, // |q|
    pair_norm, // the norm of its rotary pair; |q| where it has none
    square,    // q^2
};

struct MethodInfo {
    std::string name;
    std::string summary; // one line
    std::string paper;   // title, year, identifier; "-" for formats without one
    std::vector<OptionInfo> options;
    bool uses_query = false; // statistics of q are kept for it
    QuerySum query_sum = QuerySum::magnitude;
    bool calibrated = false; // needs a calibration file (option calib)
};

enum class QueryScope : uint8_t { running, window }; // all queries so far, or those since the last seal
enum class MapScope : uint8_t { block, first_step }; // one plan per block, or one for all blocks the first step seals

class Method {
public:
    virtual ~Method() = default;
    virtual const MethodInfo& info() const = 0;
    // The fixed part of the plan. `layer`, `kv_head` are those of the model.
    virtual SidePlan initial(Side side, int32_t layer, int32_t kv_head, int32_t dim) const = 0;
    // Whether a sequence decides part of the plan once: when its first front + 128 rows are there, before its first
    // flush (whose window says first = 128), whatever the prompt's length.
    virtual bool freezes(Side side) const { return (void)side, false; }
    // That decision: transform, ladder, mean or pinned. in.rows: all front + 128 rows; where keys are `centred`, turned
    // back by their positions. Vectors have room already.
    virtual void freeze(const PlanInput& in, SidePlan* plan) const { (void)in, (void)plan; }
    // Decides ladder and channels of the block (tiered stores only). Never fails; later tokens never enter.
    virtual void plan(const PlanInput& in, SidePlan* plan) const { (void)in, (void)plan; }
    // Widths that plan() may use, for reserving the worst case; empty for stores that are not tiered.
    virtual std::vector<uint8_t> widths(Side side) const { return (void)side, std::vector<uint8_t>{}; }
    virtual QueryScope query_scope() const { return QueryScope::running; }
    virtual MapScope map_scope() const { return MapScope::block; }
    // Called once with the model's shape, before any plan; refuses what the method cannot serve. The one call that may
    // change the method: it may keep what its plans need of the shape.
    virtual Status accept(const ModelShape& shape) { return (void)shape, Status(); }

    const std::string& spec() const { return spec_; } // canonical: options that differ from their defaults, in order

protected:
    // For methods that open_method does not make (Cache::create): the name under which states are saved.
    void set_spec(std::string spec) { spec_ = std::move(spec); }

private:
    friend Result<std::unique_ptr<Method>> open_method(std::string_view spec);
    std::string spec_;
};

// Parses `name[:option=value,...]` and makes the method. Errors name the option, the value and the allowed range, and
// suggest the nearest name.
Result<std::unique_ptr<Method>> open_method(std::string_view spec);

// Every registered method, in the order of methods.def.
const std::vector<const MethodInfo*>& methods();

} // namespace kvmosaic
