#include "eval/bench_cuda.h"

#include <fmt/format.h>

#include "cache/state_page.h"
#include "eval/bench_cpu.h"
#include "kvmosaic/device_cache.h"

#ifdef KVMOSAIC_WITH_CUDA

#include <algorithm>
#include <thread>

#include <cuda_runtime_api.h>

namespace kvmosaic::eval {

namespace {

using device::ElementType;

constexpr int64_t kLeastWorkingSet = 400'000'000;

Status failed(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return {};
    return {error == cudaErrorMemoryAllocation ? StatusCode::out_of_memory : StatusCode::unsupported,
            fmt::format("{}: {}", what, cudaGetErrorString(error))};
}

struct DeviceBytes {
    void* at = nullptr;
    ~DeviceBytes() { cudaFree(at); }
    Status take(size_t bytes) { return failed("memory of the GPU", cudaMalloc(&at, bytes)); }
};

// Events around replays of one graph.
class Replay {
public:
    ~Replay() {
        if (graph_) cudaGraphExecDestroy(graph_);
        if (begin_) cudaEventDestroy(begin_);
        if (end_) cudaEventDestroy(end_);
        if (stream_) cudaStreamDestroy(stream_);
    }
    template <class Work>
    Status capture(Work work) {
        if (Status bad = failed("stream", cudaStreamCreate(&stream_)); !bad) return bad;
        if (Status bad = failed("event", cudaEventCreate(&begin_)); !bad) return bad;
        if (Status bad = failed("event", cudaEventCreate(&end_)); !bad) return bad;
        if (Status bad = failed("capture", cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal)); !bad)
            return bad;
        const Status done = work(stream_);
        cudaGraph_t graph = nullptr;
        const Status ended = failed("capture", cudaStreamEndCapture(stream_, &graph));
        if (!done || !ended) return done ? ended : done;
        const Status made = failed("graph", cudaGraphInstantiate(&graph_, graph, 0));
        cudaGraphDestroy(graph);
        return made;
    }
    Result<double> run() { // microseconds
        cudaEventRecord(begin_, stream_);
        if (Status bad = failed("graph", cudaGraphLaunch(graph_, stream_)); !bad) return bad;
        cudaEventRecord(end_, stream_);
        if (Status bad = failed("graph", cudaEventSynchronize(end_)); !bad) return bad;
        float ms = 0.0f;
        if (Status bad = failed("event", cudaEventElapsedTime(&ms, begin_, end_)); !bad) return bad;
        return double(ms) * 1e3;
    }

private:
    cudaStream_t stream_ = nullptr;
    cudaGraphExec_t graph_ = nullptr;
    cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

class CudaSubject final : public BenchSubject {
public:
    CudaSubject(const BenchShape& shape, GgmlPool& pool, std::unique_ptr<Cache> cache, std::vector<int32_t> layers)
        : shape_(shape), pool_(pool), cache_(std::move(cache)), layers_(std::move(layers)) {}

    Status prepare(const BenchData& data, std::unique_ptr<Cache> like, int32_t threads) {
        for (SeqId seq = 0; seq < shape_.batch; ++seq)
            if (Status bad = fill(*cache_, data, threads, seq, 0, shape_.context); !bad) return bad;
        device::DeviceCacheOptions options;
        options.slots = shape_.batch, options.max_rows = shape_.context;
        options.threads = threads;
        auto moved = device::DeviceCache::create(std::move(like), options);
        if (!moved) return moved.status();
        moved_ = std::move(*moved);
        for (SeqId seq = 0; seq < shape_.batch; ++seq)
            if (Status bad = moved_->upload(seq, *cache_, seq); !bad) return bad;

        auto kernel = moved_->attention(layers_[0], shape_.query_rows);
        if (!kernel) return kernel.status();
        kernel->expected_rows = shape_.context * shape_.batch;
        row.bytes = bytes_to_read(&kernel->key_bytes);
        auto attention = device::Attention::create(*kernel);
        if (!attention) return attention.status();
        attention_ = std::move(*attention);
        q_ = data.queries(int64_t(shape_.batch) * shape_.query_rows, kQuerySeed);
        std::vector<uint16_t> narrow(q_.size());
        for (size_t i = 0; i < q_.size(); ++i) {
            narrow[i] = f32_to_bf16(q_[i]);
            q_[i] = bf16_to_f32(narrow[i]); // what the GPU is given
        }
        if (Status bad = device_q_.take(q_.size() * 2); !bad) return bad;
        if (Status bad = device_packed_q_.take(q_.size() * 2); !bad) return bad;
        if (Status bad = device_out_.take(q_.size() * 4); !bad) return bad;
        if (Status bad =
                failed("queries", cudaMemcpy(device_q_.at, narrow.data(), narrow.size() * 2, cudaMemcpyHostToDevice));
            !bad)
            return bad;
        const int32_t group = moved_->group_of(layers_[0]);
        if (Status bad = attention_->plan(moved_->states(group), shape_.batch, nullptr); !bad) return bad;
        if (Status bad = failed("plan", cudaDeviceSynchronize()); !bad) return bad;
        row.path = "fused", row.isa = attention_->kernel();
        return replay_.capture([&](cudaStream_t stream) -> Status {
            for (const int32_t layer : layers_)
                if (Status bad = attend(layer, stream); !bad) return bad;
            return {};
        });
    }

    double call() override {
        const Result<double> us = replay_.run();
        if (!us) status_ = us.status();
        return us ? *us / double(layers_.size()) : 0.0;
    }

    double error() override {
        std::vector<float> got(q_.size());
        if (!attend(layers_[0], nullptr) || cudaDeviceSynchronize() != cudaSuccess ||
            cudaMemcpy(got.data(), device_out_.at, got.size() * 4, cudaMemcpyDeviceToHost) != cudaSuccess || !status_)
            return std::nan("");
        return error_of(pool_, shape_, q_.data(), got.data(), [this](Side side, int32_t seq, int32_t head, int64_t n) {
            std::vector<float> rows(size_t(n) * size_t(shape_.head_dim));
            cache_->decode(seq, layers_[0], head, side, 0, n, rows.data());
            return rows;
        });
    }

private:
    static constexpr uint64_t kQuerySeed = 2;

    // As they lie on the device: pages with their padding, raw rows. largest: of the key pages of tiered stores.
    int64_t bytes_to_read(uint32_t* largest) const {
        int64_t bytes = 0;
        uint32_t most = 0;
        for (const int32_t layer : layers_)
            for (SeqId seq = 0; seq < shape_.batch; ++seq)
                for (int32_t head = 0; head < shape_.kv_heads; ++head)
                    for (const Side side : {Side::key, Side::value}) {
                        const StoreSpec& store = cache_->plan(seq, layer, head, side).store;
                        for (int64_t i = 0; i < cache_->pages(seq, layer, side); ++i) {
                            const Ladder ladder = state::ladder_of(*cache_->page(seq, layer, head, side, i).layout);
                            const uint32_t n = device::page_bytes(store, side, shape_.head_dim, ladder);
                            bytes += n;
                            if (side == Side::key) most = std::max(most, n);
                        }
                        const int64_t raw = cache_->rows(seq) - cache_->packed_rows(seq, layer, side);
                        bytes += raw * shape_.head_dim * 2;
                    }
        *largest = most;
        return bytes / int64_t(layers_.size());
    }

    Status attend(int32_t layer, cudaStream_t stream) {
        device::AttendCall call;
        call.memory = moved_->layer(layer);
        call.q = device_q_.at, call.out = device_out_.at;
        call.q_type = ElementType::bf16, call.out_type = ElementType::f32;
        call.scale = shape_.scale();
        call.mean = moved_->key_mean(layer);
        const auto basis = moved_->key_basis(layer);
        if (!basis) return basis.status();
        if (basis->any()) {
            device::BasisCall turn;
            turn.basis = *basis, turn.states = moved_->states(moved_->group_of(layer));
            turn.sequences = shape_.batch, turn.rows = shape_.query_rows;
            turn.heads = shape_.heads, turn.kv_heads = shape_.kv_heads, turn.dim = shape_.head_dim;
            turn.q = device_q_.at, turn.type = ElementType::bf16, turn.out = device_packed_q_.at;
            if (Status bad = device::to_key_basis(turn, stream); !bad) return bad;
            call.q_packed = device_packed_q_.at;
        }
        return attention_->attend(call, stream);
    }

    BenchShape shape_;
    GgmlPool& pool_;
    std::unique_ptr<Cache> cache_;
    std::vector<int32_t> layers_;
    std::unique_ptr<device::DeviceCache> moved_;
    std::unique_ptr<device::Attention> attention_;
    std::vector<float> q_;
    DeviceBytes device_q_, device_packed_q_, device_out_;
    Replay replay_;
    Status status_;
};

class CudaDevice final : public BenchDevice {
public:
    CudaDevice(const BenchShape& shape, std::string name)
        : shape_(shape), name_(std::move(name)), data_(shape),
          pool_(std::clamp(int32_t(std::thread::hardware_concurrency()), 1, 64)) {
        shape_.working_set = std::max(shape_.working_set, kLeastWorkingSet);
    }

    Result<std::unique_ptr<BenchSubject>> cache(const std::string& spec, Segment segment) override {
        if (segment == Segment::raw)
            return Status(StatusCode::unsupported, fmt::format("{}: it packs nothing; raw rows alone are what "
                                                               "bench/cuda/baseline.py measures on a GPU",
                                                               spec));
        const Result<int32_t> count = layers_for(spec, shape_, segment);
        if (!count) return count.status();
        auto filled = open_segment(spec, segment, shape_, *count), like = open_segment(spec, segment, shape_, *count);
        if (!filled || !like) return filled ? like.status() : filled.status();
        std::vector<int32_t> layers = packing_layers((*filled)->method(), *count, shape_);
        auto subject = std::make_unique<CudaSubject>(shape_, pool_, std::move(*filled), std::move(layers));
        subject->row.spec = spec;
        subject->row.segment = name_of(segment);
        subject->row.device = name_;
        if (Status bad = subject->prepare(data_, std::move(*like), pool_.threads()); !bad)
            return Status(bad.code(), fmt::format("{}: {}", spec, bad.message()));
        return std::unique_ptr<BenchSubject>(std::move(subject));
    }

    Result<std::unique_ptr<BenchSubject>> baseline(const std::string& name) override {
        return Status(
            StatusCode::unsupported,
            fmt::format("--baseline {}: on a GPU other attention is measured by bench/cuda/baseline.py", name));
    }

    // What the memory's clock and width allow; reads reach some 95 % of it.
    double read_bandwidth() override {
        int device = 0, khz = 0, bits = 0;
        if (cudaGetDevice(&device) != cudaSuccess ||
            cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, device) != cudaSuccess ||
            cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device) != cudaSuccess)
            return 0.0;
        return 2.0 * double(khz) * 1e3 * double(bits) / 8.0; // twice a clock
    }

private:
    BenchShape shape_;
    std::string name_;
    BenchData data_;
    GgmlPool pool_;
};

} // namespace

Result<std::unique_ptr<BenchDevice>> open_cuda_device(const BenchShape& shape) {
    const std::vector<device::DeviceInfo> found = device::devices();
    if (found.empty()) return Status(StatusCode::unsupported, "--device cuda: this machine has no GPU");
    if (!found[0].runs)
        return Status(StatusCode::unsupported, fmt::format("--device cuda: {} (compute capability {}.{}) runs none of "
                                                           "the kernels of this build",
                                                           found[0].name, found[0].major, found[0].minor));
    return std::unique_ptr<BenchDevice>(std::make_unique<CudaDevice>(shape, found[0].name));
}

} // namespace kvmosaic::eval

#else

namespace kvmosaic::eval {

Result<std::unique_ptr<BenchDevice>> open_cuda_device(const BenchShape&) {
    return Status(StatusCode::unsupported,
                  "--device cuda: this program was built without the GPU backend (KVMOSAIC_CUDA is off)");
}

} // namespace kvmosaic::eval

#endif
