// include/kvmosaic/device.h over the kernels.
#include "kvmosaic/device.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/encode.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/restore.h"

namespace kvmosaic::device {

using cuda::AttendInstance;
using cuda::AttendParams;
using cuda::DevicePage;

namespace {

Status bad(const std::string& what) { return Status(StatusCode::invalid_argument, what); }
Status failed(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return Status();
    const StatusCode code = error == cudaErrorMemoryAllocation ? StatusCode::out_of_memory
                            : error == cudaErrorNotSupported   ? StatusCode::unsupported
                                                               : StatusCode::invalid_argument;
    return Status(code, std::string(what) + ": " + cudaGetErrorString(error));
}
cudaStream_t stream_of(Stream s) { return static_cast<cudaStream_t>(s); }

// A store that exists, and that kernels of this backend can be for.
Status served(const StoreSpec& spec, Side side, int32_t dim) {
    if (Status s = validate(spec, side, dim); !s) return s;
    if (in_planes(spec.rule))
        return Status(StatusCode::unsupported,
                      std::string(name_of(side)) + " side: pages in planes are encoded and restored on the CPU");
    return Status();
}

// One allocation that is cut into arrays.
struct Block {
    uint8_t* base = nullptr;
    size_t used = 0;
    ~Block() { cudaFree(base); }
    template <class T>
    size_t take(size_t count) {
        const size_t at = used;
        used = (used + count * sizeof(T) + 255) / 256 * 256;
        return at;
    }
    template <class T>
    T* at(size_t offset) const {
        return reinterpret_cast<T*>(base + offset);
    }
};

bool same_store(const DevicePage& a, const DevicePage& b) {
    if (a.kind != b.kind || a.dim != b.dim || a.groups != b.groups || a.along_depth != b.along_depth ||
        a.params != b.params || a.levels != b.levels || a.clip != b.clip || a.outliers != b.outliers ||
        a.wide != b.wide)
        return false;
    // With one scale for each channel and 2 bits or more, midpoint and asymmetric pages are read alike.
    const auto plain = [](GridRule r) { return r == GridRule::asym || r == GridRule::midpoint; };
    if (a.rule != b.rule && !(plain(a.rule) && plain(b.rule))) return false;
    return a.kind == StoreKind::tiered ? (a.map_entries > 0) == (b.map_entries > 0)
                                       : a.tiers[0].bits == b.tiers[0].bits;
}

// Kernels of a target that this device is not are in the table too.
bool loads(const AttendInstance& row) {
    cudaFuncAttributes attributes;
    const bool found = cudaFuncGetAttributes(&attributes, row.kernel) == cudaSuccess;
    if (!found) cudaGetLastError();
    return found;
}

Ladder any_ladder(const std::vector<uint8_t>& widths, int32_t dim) {
    return widths.empty() ? Ladder{} : Ladder::uniform(widths.back(), uint16_t(dim));
}

} // namespace

std::vector<DeviceInfo> devices() {
    std::vector<DeviceInfo> all;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return all;
    }
    for (int i = 0; i < count; ++i) {
        cudaDeviceProp device;
        if (cudaGetDeviceProperties(&device, i) != cudaSuccess) continue;
        DeviceInfo info;
        info.name = device.name;
        info.major = device.major, info.minor = device.minor;
        info.multiprocessors = device.multiProcessorCount;
        info.memory = int64_t(device.totalGlobalMem);
        cudaFuncAttributes attributes;
        info.runs = !cuda::attend_instances().empty() && cudaSetDevice(i) == cudaSuccess &&
                    cudaFuncGetAttributes(&attributes, cuda::attend_instances()[0]->kernel) == cudaSuccess;
        cudaGetLastError();
        all.push_back(info);
    }
    if (count > 0) cudaSetDevice(0);
    return all;
}

std::vector<std::string> attention_kernels() {
    std::vector<std::string> names;
    for (const AttendInstance* row : cuda::attend_instances())
        names.emplace_back(row->name);
    return names;
}

struct Attention::Impl {
    AttentionShape shape;
    const AttendInstance* instance = nullptr;
    std::string name;
    int32_t blocks = 0, sequences = 0;
    Block memory;
    AttendParams params;
    cuda::PlanParams plan;
};

Attention::Attention(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Attention::~Attention() = default;
const std::string& Attention::kernel() const { return impl_->name; }
int64_t Attention::scratch_bytes() const { return int64_t(impl_->memory.used); }

Result<std::unique_ptr<Attention>> Attention::create(const AttentionShape& shape) {
    if (shape.kv_heads < 1 || shape.heads < 1 || shape.heads % shape.kv_heads != 0)
        return bad("heads = " + std::to_string(shape.heads) + ", kv_heads = " + std::to_string(shape.kv_heads) +
                   ": heads must be a multiple of kv_heads");
    if (shape.rows < 1 || shape.rows > 16) return bad("rows = " + std::to_string(shape.rows) + ": must be 1 to 16");
    if (shape.max_sequences < 1) return bad("max_sequences: must be at least 1");
    if (Status s = validate(shape.key, Side::key, shape.dim); !s) return s;
    if (Status s = validate(shape.value, Side::value, shape.dim); !s) return s;
    if (shape.value_hadamard != 0 && (shape.value_hadamard != shape.dim || shape.value.rule != GridRule::fitted))
        return bad("value_hadamard = " + std::to_string(shape.value_hadamard) +
                   ": must be 0, or dim where values are fitted");
    bool filled = true; // granules of a ladder without a map: dead channels move the next tier's
    if (shape.key.kind == StoreKind::tiered && !shape.key.page_map) {
        if (Status s = validate(shape.ladder, shape.dim); !s) return s;
        for (int i = 0; i + 1 < shape.ladder.count; ++i) {
            const Tier& tier = shape.ladder.tiers[size_t(i)];
            filled = filled && tier.channels % (tier.bits == 16 ? 8 : cuda::device_granule(tier.bits)) == 0;
        }
    }
    const DevicePage key =
        cuda::device_page(layout(shape.key, Side::key, shape.dim, any_ladder(shape.widths, shape.dim)));
    const DevicePage value = cuda::device_page(layout(shape.value, Side::value, shape.dim));
    auto impl = std::make_unique<Impl>();
    const int32_t group = shape.heads / shape.kv_heads, columns = shape.rows * group;
    for (const AttendInstance* row : cuda::attend_instances()) {
        if (row->dim != shape.dim || row->widths != shape.widths) continue;
        if ((shape.key_basis && !row->basis) || (!filled && row->unit > 32)) continue;
        if (impl->instance && cuda::instance_rank(*row, columns) >= cuda::instance_rank(*impl->instance, columns))
            continue;
        if (same_store(key,
                       cuda::device_page(layout(row->key, Side::key, row->dim, any_ladder(row->widths, row->dim)))) &&
            same_store(value, cuda::device_page(layout(row->value, Side::value, row->dim))) && loads(*row))
            impl->instance = row;
    }
    if (!impl->instance)
        return Status(StatusCode::unsupported,
                      "no fused kernel of this build reads these stores at head size " + std::to_string(shape.dim));
    const AttendInstance& row = *impl->instance;
    impl->name = row.name;
    impl->shape = shape;
    const int32_t team = (columns + row.columns - 1) / row.columns;
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return failed("device", error);
    const uint32_t limit = cuda::shared_limit(row);
    // Up to two pages a warp the start of a wide block costs more than its width brings.
    const int64_t pages = shape.expected_rows / kPageTokens * shape.kv_heads;
    const bool small = shape.expected_rows > 0 && pages < int64_t(multiprocessors) * 24;
    const int32_t most = row.threads / row.unit;
    int32_t warps = shape.warps > 0 ? shape.warps : small && row.unit == 32 ? 8 : most;
    warps = std::min(warps, most) / team * team;
    if (warps == 0) warps = team;
    if (warps > most)
        return Status(StatusCode::unsupported, std::to_string(columns) +
                                                   " query rows times heads of a KV head: at most " +
                                                   std::to_string(most * row.columns));
    const uint32_t key_bytes = shape.widths.empty() ? key.bytes
                               : shape.key_bytes
                                   ? shape.key_bytes
                                   : cuda::worst_device_page_bytes(shape.key, Side::key, shape.dim, shape.widths);
    AttendParams& p = impl->params;
    for (int32_t slots = shape.slots > 0 ? shape.slots : team > 1 || row.unit > 32 ? 2 : 1;; --slots) {
        p.shared = row.shared(key_bytes, warps, team, slots);
        p.slots = slots;
        if (p.shared.bytes <= limit) break;
        if (slots > 1) continue;
        if (warps <= team)
            return Status(StatusCode::unsupported, "pages of " + std::to_string(key_bytes) + " bytes do not fit");
        warps -= team, slots = 2;
    }
    error = cudaFuncSetAttribute(row.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(p.shared.bytes));
    if (error != cudaSuccess) return failed("shared memory", error);
    const int32_t per = shape.blocks_per_multiprocessor > 0 ? shape.blocks_per_multiprocessor : 1;
    impl->blocks = multiprocessors * per;
    const int32_t teams = warps / team;

    Block& m = impl->memory;
    const size_t heads = size_t(shape.max_sequences) * size_t(shape.kv_heads), dim = size_t(shape.dim);
    const size_t partial = size_t(impl->blocks) * size_t(warps) * size_t(row.columns);
    const size_t shares = size_t(impl->blocks) * 2 * size_t(columns);
    const size_t plans = m.take<cuda::SequencePlan>(size_t(shape.max_sequences));
    const size_t prefix = m.take<int32_t>(size_t(shape.max_sequences) + 1);
    const size_t team_plans = m.take<cuda::TeamPlan>(size_t(impl->blocks) * size_t(teams));
    const size_t block_plans = m.take<cuda::BlockPlan>(size_t(impl->blocks));
    const size_t head_plans = m.take<cuda::HeadPlan>(heads), arrivals = m.take<int32_t>(heads);
    const size_t warp_partial = m.take<float>(partial * dim), warp_ml = m.take<float2>(partial);
    const size_t block_partial = m.take<float>(shares * dim), block_ml = m.take<float2>(shares);
    error = cudaMalloc(&m.base, m.used);
    if (error == cudaSuccess) error = cudaMemset(m.base, 0, m.used);
    if (error != cudaSuccess) return failed("scratch memory", error);

    p.plans = m.at<cuda::SequencePlan>(plans);
    p.teams = m.at<cuda::TeamPlan>(team_plans);
    p.blocks = m.at<cuda::BlockPlan>(block_plans);
    p.heads_plan = m.at<cuda::HeadPlan>(head_plans);
    p.arrivals = m.at<int32_t>(arrivals);
    p.warp_partial = m.at<float>(warp_partial), p.warp_ml = m.at<float2>(warp_ml);
    p.block_partial = m.at<float>(block_partial), p.block_ml = m.at<float2>(block_ml);
    p.rows = shape.rows, p.heads = shape.heads, p.kv_heads = shape.kv_heads;
    p.value_hadamard = shape.value_hadamard;
    p.book = cuda::book_table(shape.key);
    cuda::set_tier_first(shape.ladder, shape.widths, p.tier_first);
    p.group = group, p.group_inverse = 65536 / group + 1;
    p.warps_per_block = warps, p.teams_per_block = teams, p.team = team;
    cuda::PlanParams& plan = impl->plan;
    plan.plans = m.at<cuda::SequencePlan>(plans);
    plan.teams_plan = m.at<cuda::TeamPlan>(team_plans);
    plan.blocks_plan = m.at<cuda::BlockPlan>(block_plans);
    plan.heads = m.at<cuda::HeadPlan>(head_plans);
    plan.prefix = m.at<int32_t>(prefix);
    plan.kv_heads = shape.kv_heads, plan.rows = shape.rows, plan.blocks = impl->blocks, plan.teams = teams;
    return std::unique_ptr<Attention>(new Attention(std::move(impl)));
}

Status Attention::plan(const SequenceState* states, int32_t sequences, Stream stream) {
    if (sequences < 0 || sequences > impl_->shape.max_sequences)
        return bad("sequences = " + std::to_string(sequences) + ": must be 0 to " +
                   std::to_string(impl_->shape.max_sequences));
    impl_->sequences = sequences;
    if (sequences == 0) return Status();
    cuda::PlanParams plan = impl_->plan;
    plan.states = states;
    plan.sequences = sequences;
    return failed("plan", cuda::launch_plan(plan, stream_of(stream)));
}

Status Attention::attend(const AttendCall& call, Stream stream) {
    if (call.q_type == ElementType::f32) return bad("q_type = f32: must be f16 or bf16");
    if (call.memory.raw == ElementType::f32) return bad("raw = f32: must be f16 or bf16");
    if (!call.q_packed != !impl_->shape.key_basis) return bad("q_packed: comes with key_basis, and not without it");
    if (impl_->sequences == 0) return Status();
    AttendParams p = impl_->params;
    p.sequences = impl_->sequences;
    const LayerMemory& m = call.memory;
    p.key_pool = m.key.pool, p.value_pool = m.value.pool;
    p.key_pages = m.key.pages, p.value_pages = m.value.pages;
    p.table_stride = m.table_stride;
    p.key_front = m.key.front, p.key_recent = m.key.recent;
    p.value_front = m.value.front, p.value_recent = m.value.recent;
    p.raw_type = m.raw;
    p.mean = call.mean;
    p.q = call.q, p.q_packed = call.q_packed, p.out = call.out, p.q_type = call.q_type, p.out_type = call.out_type;
    p.log_sum = call.log_sum;
    p.scale_log2 = float(double(call.scale) * 1.4426950408889634);
    return failed("attend",
                  cuda::launch_attend(*impl_->instance, p, impl_->blocks, impl_->shape.early, stream_of(stream)));
}

Status to_key_basis(const BasisCall& call, Stream stream) {
    if (call.dim != 64 && call.dim != 128 && call.dim != 256)
        return Status(StatusCode::unsupported, "dim = " + std::to_string(call.dim) + ": must be 64, 128 or 256");
    const int32_t run = call.basis.hadamard;
    if (run < 0 || run > call.dim || (run & (run - 1)) != 0)
        return Status(StatusCode::unsupported, "hadamard = " + std::to_string(run) +
                                                   ": must be a power of two, at most " + std::to_string(call.dim));
    if (call.heads < 1 || call.kv_heads < 1 || call.heads % call.kv_heads != 0)
        return bad("heads: must be a multiple of kv_heads");
    if (call.type == ElementType::f32) return bad("type = f32: must be f16 or bf16");
    if (call.sequences < 1 || call.rows < 1) return Status();
    return failed("to_key_basis", cuda::launch_to_key_basis(call, stream_of(stream)));
}

namespace {

cuda::EncodeParams encode_params(const EncodeCall& call) {
    cuda::EncodeParams p;
    p.rows = call.rows, p.row_stride = call.row_stride, p.type = call.type;
    p.jobs = call.jobs, p.count = call.count, p.pool = call.pool, p.order = call.order;
    return p;
}

} // namespace

Status encode(const StoreSpec& spec, Side side, int32_t dim, const EncodeCall& call, Stream stream,
              const Ladder& ladder) {
    if (Status s = served(spec, side, dim); !s) return s;
    if (call.type == ElementType::f32) return bad("type = f32: rows must be f16 or bf16");
    if (spec.kind == StoreKind::tiered) {
        if (Status s = validate(ladder, dim); !s) return s;
        return failed("encode", cuda::launch_encode_tiers(cuda::device_page(layout(spec, side, dim, ladder)),
                                                          encode_params(call), stream_of(stream)));
    }
    const DevicePage page = cuda::device_page(layout(spec, side, dim));
    return failed("encode", page.along_depth
                                ? cuda::launch_encode_depth(page, spec.book, encode_params(call), stream_of(stream))
                                : cuda::launch_encode_grid(page, encode_params(call), stream_of(stream)));
}

Status encode_mix(const MixCall& call, Stream stream) {
    if (call.pages.type == ElementType::f32) return bad("type = f32: rows must be f16 or bf16");
    cuda::EncodeParams p = encode_params(call.pages);
    p.query_sum = call.query_sum, p.query_count = call.query_count;
    p.raw_above = call.raw_above, p.mid_above = call.mid_above;
    p.table = call.table, p.table_stride = call.table_stride;
    p.pool_used = call.pool_used, p.pool_units = call.pool_units, p.exhausted = call.exhausted;
    return failed("encode_mix", cuda::launch_encode_mix(p, stream_of(stream)));
}

Status restore(const StoreSpec& spec, Side side, int32_t dim, const RestoreCall& call, Stream stream,
               const Ladder& ladder) {
    if (Status s = served(spec, side, dim); !s) return s;
    const bool coded = spec.kind == StoreKind::tiered && !call.widths.empty();
    if (coded && (call.widths.size() > 4 || !spec.page_map))
        return bad("widths: at most four, of tiered pages with a map");
    if (spec.kind == StoreKind::tiered && !coded)
        if (Status s = validate(ladder, dim); !s) return s;
    if (spec.edge_groups > cuda::kMostEdges)
        return Status(StatusCode::unsupported, "restore: at most " + std::to_string(cuda::kMostEdges) + " edges");
    cuda::RestoreParams p =
        cuda::restore_params(layout(spec, side, dim, coded ? any_ladder(call.widths, dim) : ladder));
    p.pool = call.pool, p.jobs = call.jobs, p.count = call.count;
    p.rows = call.rows, p.row_stride = call.row_stride, p.type = call.type;
    if (coded) {
        p.width_count = int32_t(call.widths.size());
        std::copy(call.widths.begin(), call.widths.end(), p.widths);
    }
    return failed("restore", cuda::launch_restore(p, stream_of(stream)));
}

Status advance(SequenceState* states, int32_t sequences, int32_t new_rows, const RowWindow& key, const RowWindow& value,
               Stream stream) {
    if (new_rows < 1 || new_rows > kPageTokens)
        return bad("new_rows = " + std::to_string(new_rows) + ": must be 1 to 128");
    cuda::AdvanceParams p;
    p.states = states, p.sequences = sequences, p.new_rows = new_rows, p.key = key, p.value = value;
    return failed("advance", cuda::launch_advance(p, stream_of(stream)));
}

Status append(const AppendCall& call, Stream stream) {
    for (const auto& [spec, side] : {std::pair(call.key, Side::key), std::pair(call.value, Side::value)})
        if (Status s = served(spec, side, call.dim); !s) return s;
    if (call.type == ElementType::f32 || call.memory.raw == ElementType::f32)
        return bad("type = f32: must be f16 or bf16");
    const DevicePage value = cuda::device_page(layout(call.value, Side::value, call.dim));
    const DevicePage key =
        cuda::device_page(layout(call.key, Side::key, call.dim, Ladder::uniform(2, uint16_t(call.dim))));
    const bool plain = value.kind == StoreKind::grid && value.rule == GridRule::asym && value.levels == 0 &&
                       value.clip == 1.0f && !value.along_depth && value.params == ParamType::f16 &&
                       (value.groups == 1 || call.dim / value.groups % 32 == 0) &&
                       value.group * value.groups >= call.dim;
    const bool key_plain = key.kind == StoreKind::tiered ||
                           (key.kind == StoreKind::grid && key.rule == GridRule::asym && key.levels == 0 &&
                            key.clip == 1.0f && !key.along_depth && key.params == ParamType::f16);
    if (!plain || !key_plain)
        return Status(StatusCode::unsupported, "append: only asymmetric f16 grids with groups of tokens (keys) and "
                                               "channels (values)");
    cuda::AppendParams p;
    p.memory = call.memory, p.states = call.states, p.sequences = call.sequences, p.new_rows = call.new_rows;
    p.kv_heads = call.kv_heads, p.k = call.k, p.v = call.v, p.type = call.type;
    p.value_bits = value.tiers[0].bits, p.value_groups = value.groups;
    p.value_plane = uint32_t(call.dim) * 32, p.value_scales = value.scale_offset, p.value_zeros = value.zero_offset;
    p.value_bytes = value.bytes, p.key_scales = key.scale_offset, p.key_zeros = key.zero_offset;
    return failed("append", cuda::launch_append(key, p, stream_of(stream)));
}

Status add_queries(const QueryCall& call, Stream stream) {
    if (call.kv_heads < 1 || call.heads % call.kv_heads != 0)
        return bad("heads = " + std::to_string(call.heads) + ": must be a multiple of kv_heads");
    if (call.type == ElementType::f32 || call.raw == ElementType::f32) return bad("type = f32: must be f16 or bf16");
    return failed("add_queries", cuda::launch_add_queries(call, stream_of(stream)));
}

} // namespace kvmosaic::device
