// include/kvmosaic/device.h over the kernels: devices and attention. Pages and steps: device_pages.cu.
#include "kvmosaic/device.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/device_util.h"
#include "kernels/cuda/encode.h"
#include "kernels/cuda/launch.h"

namespace kvmosaic::device {

using cuda::AttendInstance;
using cuda::AttendParams;
using cuda::DevicePage;

namespace {

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
    const int64_t full = shape.expected_rows / kPageTokens * shape.kv_heads;
    const int64_t pages = shape.expected_rows > 0 ? std::max<int64_t>(full, 1) : 0;
    const int32_t most = row.threads / row.unit;
    int32_t warps = shape.warps > 0 ? shape.warps : cuda::instance_units(row, pages, multiprocessors);
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
    const size_t arrivals = m.take<int32_t>(heads * size_t(columns));
    const size_t warp_partial = m.take<float>(partial * dim), warp_ml = m.take<float2>(partial);
    const size_t block_partial = m.take<float>(shares * dim), block_ml = m.take<float2>(shares);
    error = cudaMalloc(&m.base, m.used);
    if (error == cudaSuccess) error = cudaMemset(m.base, 0, m.used);
    if (error != cudaSuccess) return failed("scratch memory", error);

    p.plans = m.at<cuda::SequencePlan>(plans);
    p.teams = m.at<cuda::TeamPlan>(team_plans);
    p.blocks = m.at<cuda::BlockPlan>(block_plans);
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

} // namespace kvmosaic::device
