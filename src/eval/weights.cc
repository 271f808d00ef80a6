#include "eval/weights.h"

#include <cstdio>
#include <filesystem>
#include <memory>

#include <fmt/format.h>

#include "eval/engine.h"
#include "gguf.h"
#include "llama.h"

namespace kvmosaic::eval {

namespace {

constexpr double kGiB = double(1 << 30);

struct SourceFacts {
    bool plain = true; // no tensor is quantized
    int64_t elements = 0;
};

Result<SourceFacts> inspect(const std::string& path) {
    ggml_context* tensors = nullptr;
    const gguf_init_params params{/*no_alloc=*/true, &tensors};
    gguf_context* file = gguf_init_from_file(path.c_str(), params);
    if (!file) return Status(StatusCode::corrupt, fmt::format("{}: is not a readable GGUF file", path));
    SourceFacts facts;
    for (ggml_tensor* t = ggml_get_first_tensor(tensors); t; t = ggml_get_next_tensor(tensors, t)) {
        facts.elements += ggml_nelements(t);
        facts.plain = facts.plain && !ggml_is_quantized(t->type);
    }
    gguf_free(file);
    ggml_free(tensors);
    return facts;
}

int64_t free_bytes(const std::string& folder) {
    std::error_code ec;
    const auto space = std::filesystem::space(folder, ec);
    return ec ? -1 : int64_t(space.available);
}

// The quantizer tells its progress only in its log: "[  12/ 290] name - ...".
void follow(const std::string& text, const Progress& progress) {
    int done = 0, total = 0;
    if (std::sscanf(text.c_str(), "[%d/%d]", &done, &total) == 2 && total > 0) {
        progress("dequantizing the weights", double(done) / total);
    }
}

} // namespace

Result<WeightType> parse_weights(const std::string& text) {
    if (text == "f16") return WeightType::f16;
    if (text == "f32") return WeightType::f32;
    if (text == "as-is") return WeightType::as_is;
    return Status(StatusCode::invalid_argument, fmt::format("weights '{}': f16, f32 or as-is", text));
}

const char* name_of(WeightType type) {
    return type == WeightType::f16 ? "f16" : type == WeightType::f32 ? "f32" : "as-is";
}

Result<Weights> prepare_weights(const WeightsRequest& request, const std::function<void(const std::string&)>& notice,
                                const Progress& progress) {
    Weights out{request.model, request.type, ""};
    if (request.type == WeightType::as_is) return out;
    const Result<SourceFacts> facts = inspect(request.model);
    if (!facts) return facts.status();
    if (facts->plain) return out; // nothing to dequantize: 16- and 32-bit weights are taken as they are

    const std::string folder = cache_folder() + "/weights";
    out.path = fmt::format("{}/{}-{}.gguf", folder, request.sha256, name_of(request.type));
    if (exists(out.path)) return out;
    const int64_t bytes = facts->elements * (request.type == WeightType::f16 ? 2 : 4);
    const auto use_as_is = [&](const std::string& why) {
        out = {request.model, WeightType::as_is,
               fmt::format("{}; the weights are used as they are, so their rounding of activations is part of every "
                           "figure (see the row \"floor\")",
                           why)};
        return out;
    };
    if (request.by_default && bytes > request.limit) {
        return use_as_is(fmt::format(
            "{} weights of this model would take {:.1f} GiB, above the {:.1f} GiB that are made "
            "without being asked (--weights {})",
            name_of(request.type), double(bytes) / kGiB, double(request.limit) / kGiB, name_of(request.type)));
    }
    if (Status bad = make_folder(folder); !bad) return bad;
    if (const int64_t room = free_bytes(folder); room >= 0 && room < bytes + bytes / 20) {
        const std::string why = fmt::format("{} has {:.1f} GiB free, {} weights need {:.1f} GiB", folder,
                                            double(room) / kGiB, name_of(request.type), double(bytes) / kGiB);
        if (request.by_default) return use_as_is(why);
        return Status(StatusCode::out_of_capacity, why);
    }
    notice(fmt::format("dequantizing the weights to {} once: {:.2f} GiB in {}", name_of(request.type),
                       double(bytes) / kGiB, out.path));

    llama_model_quantize_params params = llama_model_quantize_default_params();
    const bool half = request.type == WeightType::f16;
    params.ftype = half ? LLAMA_FTYPE_MOSTLY_F16 : LLAMA_FTYPE_ALL_F32;
    params.output_tensor_type = params.token_embedding_type = half ? GGML_TYPE_F16 : GGML_TYPE_F32;
    params.allow_requantize = true;
    params.nthread = request.threads;
    const std::string temporary = temporary_name(out.path);
    last_log_error();
    uint32_t code = 0;
    {
        const LogListener listener([&](const std::string& text) {
            if (progress) follow(text, progress);
        });
        code = llama_model_quantize(request.model.c_str(), temporary.c_str(), &params);
    }
    if (code == 0 && std::rename(temporary.c_str(), out.path.c_str()) == 0) return out;
    std::remove(temporary.c_str());
    const std::string why = last_log_error();
    return Status(StatusCode::invalid_argument, fmt::format("{}: the weights could not be dequantized{}{}",
                                                            request.model, why.empty() ? "" : ": ", why));
}

} // namespace kvmosaic::eval
