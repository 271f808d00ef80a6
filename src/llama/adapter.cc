#include "llama/adapter.h"

#include <mutex>

#include "llama-ext.h"
#include "llama/request.h"

namespace kvmosaic {
namespace {

// While it lives, errors that llama.cpp logs are kept for the status instead; all other lines go on to whom they went.
class ErrorTap {
public:
    ErrorTap() : lock_(mutex()) {
        llama_log_get(&forward_, &forward_data_);
        llama_log_set(on_line, this);
    }
    ~ErrorTap() { llama_log_set(forward_, forward_data_); }
    ErrorTap(const ErrorTap&) = delete;
    ErrorTap& operator=(const ErrorTap&) = delete;

    // The last error without the function's name and the line end.
    std::string last() const {
        std::string text = last_;
        while (!text.empty() && (text.back() == '\n' || text.back() == ' '))
            text.pop_back();
        for (const char* head : {"llama_init_from_model: ", "failed to initialize the context: "}) {
            if (text.rfind(head, 0) == 0) text.erase(0, std::string(head).size());
        }
        return text;
    }

private:
    static std::mutex& mutex() {
        static std::mutex m;
        return m;
    }
    static void on_line(ggml_log_level level, const char* text, void* data) {
        auto* tap = static_cast<ErrorTap*>(data);
        if (level == GGML_LOG_LEVEL_ERROR) {
            tap->last_ = text;
        } else if (tap->forward_) {
            tap->forward_(level, text, tap->forward_data_);
        }
    }

    std::lock_guard<std::mutex> lock_;
    ggml_log_callback forward_ = nullptr;
    void* forward_data_ = nullptr;
    std::string last_;
};

seam::Memory* memory_of(llama_context* context) { return dynamic_cast<seam::Memory*>(llama_get_memory(context)); }

// Why a context that was made has another memory than ours.
Status foreign_memory(const llama_model* model, llama_context* context) {
    const char* what = "attention with a cache of its own";
    if (!llama_get_memory(context)) {
        what = "a model without a K/V cache";
    } else if (llama_model_is_recurrent(model)) {
        what = "a recurrent model";
    } else if (llama_model_is_hybrid(model)) {
        what = "a hybrid of attention and recurrent layers";
    }
    return {StatusCode::unsupported,
            std::string("cannot serve architecture '") + llm_arch_name(model->arch) + "': " + what};
}

} // namespace

Result<llama_context*> make_context(llama_model* model, llama_context_params params, const AdapterOptions& options) {
    if (!model) return Status(StatusCode::invalid_argument, "no model was given");
    seam::Request request;
    request.options.spec = options.spec;
    request.options.method = options.method;
    request.options.cache = options.cache;
    request.options.statistics = seam::flag("KVMOSAIC_STATS");
    request.options.check_rope = seam::flag("KVMOSAIC_CHECK_ROPE");
    request.options.probe = options.probe;
    const seam::RequestScope scope(&request);
    const ErrorTap errors;
    llama_context* context = llama_init_from_model(model, params);
    // The graph rotates keys otherwise than the model's parameters say, and the method looks at rotations: once more,
    // with what the graph states.
    if (seam::Memory* memory = context ? memory_of(context) : nullptr; memory && memory->promised_wrong()) {
        request.options.ropes = memory->ropes();
        llama_free(context);
        context = llama_init_from_model(model, params);
    }
    if (!context) {
        if (!request.failure) return request.failure;
        const std::string reason = errors.last();
        return Status(StatusCode::unsupported,
                      "llama.cpp could not make a context: " + (reason.empty() ? "no reason given" : reason));
    }
    if (!memory_of(context)) {
        const Status status = foreign_memory(model, context);
        llama_free(context);
        return status;
    }
    return context;
}

Cache* cache_of(llama_context* context) {
    seam::Memory* memory = memory_of(context);
    if (!memory) return nullptr;
    memory->cache().end_step();
    return &memory->cache();
}

ModelShape shape_of(const llama_model* model) { return seam::shape_from(*model); }

ContextMemory memory_beside_cache(const llama_context* context) {
    ContextMemory out;
    for (const auto& [type, memory] : llama_get_memory_breakdown(context))
        out.weights += int64_t(memory.model), out.compute += int64_t(memory.compute);
    return out;
}

const Rope* rope_of(llama_context* context, int32_t layer) {
    seam::Memory* memory = memory_of(context);
    if (!memory || layer < 0 || size_t(layer) >= memory->cache().shape().layers.size()) return nullptr;
    return &memory->rope(layer);
}

float rope_gap(llama_context* context) {
    const seam::Memory* memory = memory_of(context);
    return memory && memory->check_rope() ? memory->gap() : -1.0f;
}

} // namespace kvmosaic
