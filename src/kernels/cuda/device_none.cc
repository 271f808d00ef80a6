// include/kvmosaic/device.h in a build without CUDA: no devices, and every call says why it cannot be served.
#ifndef KVMOSAIC_WITH_CUDA

#include "kvmosaic/device.h"

#include "kernels/cuda/memory.h"

namespace kvmosaic::device {
namespace {
Status absent() { return Status(StatusCode::unsupported, "this build has no GPU backend (KVMOSAIC_CUDA is off)"); }
} // namespace

struct Attention::Impl {
    std::string name;
};

Memory* device_memory() { return nullptr; }

std::vector<DeviceInfo> devices() { return {}; }
std::vector<std::string> attention_kernels() { return {}; }

Attention::Attention(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Attention::~Attention() = default;
Result<std::unique_ptr<Attention>> Attention::create(const AttentionShape&) { return absent(); }
const std::string& Attention::kernel() const { return impl_->name; }
int64_t Attention::scratch_bytes() const { return 0; }
Status Attention::plan(const SequenceState*, int32_t, Stream) { return absent(); }
Status Attention::attend(const AttendCall&, Stream) { return absent(); }
Status to_key_basis(const BasisCall&, Stream) { return absent(); }

Status encode(const StoreSpec&, Side, int32_t, const EncodeCall&, Stream, const Ladder&) { return absent(); }
Status restore(const StoreSpec&, Side, int32_t, const RestoreCall&, Stream, const Ladder&) { return absent(); }
Status encode_mix(const PlannedCall&, Stream) { return absent(); }
Status encode_planes(const StoreSpec&, Side, int32_t, const PlannedCall&, Stream) { return absent(); }
Status advance(SequenceState*, int32_t, int32_t, const RowWindow&, const RowWindow&, Stream) { return absent(); }
Status append(const AppendCall&, Stream) { return absent(); }
Status add_queries(const QueryCall&, Stream) { return absent(); }

} // namespace kvmosaic::device

#endif
