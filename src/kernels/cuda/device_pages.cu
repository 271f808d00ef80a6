// include/kvmosaic/device.h over the kernels: encoding, restoring, steps.
#include <algorithm>

#include "kernels/cuda/device_util.h"
#include "kernels/cuda/encode.h"
#include "kernels/cuda/restore.h"

namespace kvmosaic::device {

using cuda::DevicePage;

namespace {

cuda::EncodeParams encode_params(const EncodeCall& call) {
    cuda::EncodeParams p;
    p.rows = call.rows, p.row_stride = call.row_stride, p.type = call.type;
    p.jobs = call.jobs, p.count = call.count, p.pool = call.pool, p.order = call.order;
    return p;
}
cuda::EncodeParams planned_params(const PlannedCall& call) {
    cuda::EncodeParams p = encode_params(call.pages);
    p.query_sum = call.query_sum, p.query_count = call.query_count;
    p.raw_above = call.raw_above, p.mid_above = call.mid_above;
    p.table = call.table, p.table_stride = call.table_stride;
    p.pool_used = call.pool_used, p.pool_units = call.pool_units, p.exhausted = call.exhausted;
    return p;
}

Status check_rows(const EncodeCall& call) {
    if (call.type == ElementType::f32) return bad("type = f32: rows must be f16 or bf16");
    if (reinterpret_cast<uintptr_t>(call.rows) % 16 != 0) return bad("rows: must be aligned to 16 bytes");
    if (call.row_stride % 8 != 0)
        return bad("row_stride = " + std::to_string(call.row_stride) + ": must be a multiple of 8");
    return {};
}

} // namespace

Status encode(const StoreSpec& spec, Side side, int32_t dim, const EncodeCall& call, Stream stream,
              const Ladder& ladder) {
    if (Status s = served(spec, side, dim); !s) return s;
    if (Status bad_rows = check_rows(call); !bad_rows) return bad_rows;
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

Status encode_mix(const PlannedCall& call, Stream stream) {
    if (Status bad_rows = check_rows(call.pages); !bad_rows) return bad_rows;
    return failed("encode_mix", cuda::launch_encode_mix(planned_params(call), stream_of(stream)));
}

Status encode_planes(const StoreSpec& spec, Side side, int32_t dim, const PlannedCall& call, Stream stream) {
    if (Status s = validate(spec, side, dim); !s) return s;
    if (Status bad_rows = check_rows(call.pages); !bad_rows) return bad_rows;
    cuda::PlanesParams p;
    p.pages = planned_params(call);
    if (side == Side::key) {
        if (spec.kind != StoreKind::tiered || spec.rule != GridRule::searched || spec.vectors == 0)
            return Status(StatusCode::unsupported, "encode_planes: keys are of a searched store with a budget");
        if (call.vectors < 1 || call.vectors > spec.vectors)
            return bad("vectors = " + std::to_string(call.vectors) + ": must be 1 to " + std::to_string(spec.vectors));
        p.mean = call.mean, p.vectors = call.vectors, p.most_vectors = spec.vectors;
        p.shrinks = spec.shrinks, p.guard = call.guard;
        return failed("encode_planes", cuda::launch_encode_planes(dim, p, stream_of(stream)));
    }
    if (spec.rule != GridRule::fitted || spec.wide != 0 || spec.bits < 2 || spec.bits > 4)
        return Status(StatusCode::unsupported, "encode_planes: values are of a fitted store of 2, 3 or 4 bits");
    p.bits = spec.bits, p.hadamard = call.hadamard;
    return failed("encode_planes", cuda::launch_encode_fitted(dim, p, stream_of(stream)));
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
        if (Status s = validate(spec, side, call.dim); !s) return s;
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
    if ((!plain && !value.planes) || !key_plain)
        return Status(StatusCode::unsupported, "append: only asymmetric f16 grids with groups of tokens (keys) and "
                                               "channels (values), tiers and pages in planes");
    cuda::AppendParams p;
    p.memory = call.memory, p.states = call.states, p.sequences = call.sequences, p.new_rows = call.new_rows;
    p.kv_heads = call.kv_heads, p.k = call.k, p.v = call.v, p.type = call.type;
    p.value_bits = value.planes ? 0 : value.tiers[0].bits, p.value_groups = value.planes ? 1 : value.groups;
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
