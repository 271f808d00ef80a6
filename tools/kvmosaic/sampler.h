// How the next token is chosen: greedily, or by temperature among the likely ones.
#pragma once

#include "eval/engine.h"
#include "llama.h"

namespace kvmosaic::tool {

struct Sampling {
    double temp = 0.7, top_p = 0.95;
    uint32_t seed = 1;
};

class Sampler {
public:
    explicit Sampler(const Sampling& o, uint32_t number = 0)
        : chain_(llama_sampler_chain_init(llama_sampler_chain_default_params())) {
        if (o.temp <= 0) {
            llama_sampler_chain_add(chain_, llama_sampler_init_greedy());
            return;
        }
        llama_sampler_chain_add(chain_, llama_sampler_init_top_k(40));
        llama_sampler_chain_add(chain_, llama_sampler_init_top_p(float(o.top_p), 1));
        llama_sampler_chain_add(chain_, llama_sampler_init_temp(float(o.temp)));
        llama_sampler_chain_add(chain_, llama_sampler_init_dist(o.seed + number));
    }
    ~Sampler() { llama_sampler_free(chain_); }
    Sampler(const Sampler&) = delete;
    Sampler& operator=(const Sampler&) = delete;
    int32_t next(const eval::Context& context, int32_t item = -1) {
        return llama_sampler_sample(chain_, context.get(), item);
    }

private:
    llama_sampler* chain_;
};

} // namespace kvmosaic::tool
