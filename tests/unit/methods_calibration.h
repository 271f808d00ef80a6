// Calibration files for tests: complete for every option of a method, made of numbers that no calibration would find.
// Methods that need none pass through, so that a test can run over all registered methods alike.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <string>

#include "kvmosaic/calibration.h"
#include "kvmosaic/method.h"

namespace kvmosaic::calibrations {

inline std::vector<float> shuffled(int32_t n, std::mt19937* random) {
    std::vector<float> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0.0f);
    std::shuffle(order.begin(), order.end(), *random);
    return order;
}

// max(1, n / group) groups of unequal sizes.
inline std::vector<float> edges(int32_t n, int32_t group, std::mt19937* random) {
    std::vector<float> inner(static_cast<size_t>(n - 1));
    std::iota(inner.begin(), inner.end(), 1.0f);
    std::shuffle(inner.begin(), inner.end(), *random);
    inner.resize(size_t(std::max(1, n / group) - 1));
    inner.push_back(0.0f);
    inner.push_back(float(n));
    std::sort(inner.begin(), inner.end());
    return inner;
}

// `token`: kvtuner's base.
inline Calibration make(const std::string& method, const ModelShape& shape, bool token = false, uint32_t seed = 1) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
    Calibration file;
    file.method = method;
    file.describe(shape);
    file.tokens = 1000;
    file.text = "synthetic, for tests";
    if (method == "kvtuner") file.add("base", -1, -1, Side::key, {token ? 1.0f : 0.0f});
    for (int32_t i = 0; i < int32_t(shape.layers.size()); ++i) {
        const LayerShape& l = shape.layers[size_t(i)];
        if (!l.has_kv()) continue;
        if (method == "kvtuner") file.add("bits", i, -1, Side::key, {i % 2 ? 4.0f : 8.0f, i % 2 ? 2.0f : 4.0f});
        if (method == "rotatekv") file.add("order", i, -1, Side::key, shuffled(l.kv_heads * l.key_dim, &random));
        for (const Side side : {Side::key, Side::value}) {
            const int32_t dim = l.dim(side);
            for (const int bits : {2, 3, 4}) {
                std::vector<float> book(size_t(1) << bits);
                for (size_t j = 0; j < book.size(); ++j)
                    book[j] = -1.0f + (float(j) + 0.25f * uniform(random)) * 2.0f / float(book.size());
                if (method == "kvquant") file.add("book" + std::to_string(bits), i, -1, side, book);
            }
            for (const int32_t group : {32, 64, 128}) {
                if (method != "skvq") break;
                const std::string name = std::to_string(group);
                for (int32_t h = 0; h < l.kv_heads; ++h) {
                    file.add("order" + name, i, h, side, shuffled(dim, &random));
                    file.add("edges" + name, i, h, side, edges(dim, group, &random));
                }
                file.add("order" + name + "x", i, -1, side, shuffled(l.kv_heads * dim, &random));
                file.add("edges" + name + "x", i, -1, side, edges(l.kv_heads * dim, group, &random));
            }
        }
        for (int32_t h = 0; h < l.kv_heads && method == "kvquant"; ++h) {
            std::vector<float> shift(size_t(l.key_dim)), scale(size_t(l.key_dim));
            for (size_t d = 0; d < shift.size(); ++d)
                shift[d] = uniform(random) - 1.25f, scale[d] = 2.0f * uniform(random);
            file.add("shift", i, h, Side::key, shift);
            file.add("scale", i, h, Side::key, scale);
        }
    }
    return file;
}

// Files of this process; they go with it.
class Folder {
public:
    ~Folder() {
        for (const auto& [key, path] : paths_)
            (void)std::remove(path.c_str());
    }
    std::string path(const std::string& key, const Calibration& file) {
        const auto [at, fresh] = paths_.try_emplace(key);
        if (fresh) {
            at->second = ::testing::TempDir() + "kvmosaic-" + std::to_string(unique_) + "-" +
                         std::to_string(paths_.size()) + ".txt";
            const Status s = write_calibration(at->second, file);
            EXPECT_TRUE(s.ok()) << s.message();
        }
        return at->second;
    }
    static Folder& here() {
        static Folder folder;
        return folder;
    }

private:
    uint32_t unique_ = std::random_device()();
    std::map<std::string, std::string> paths_;
};

// The spec with a calibration file for this shape, where its method needs one.
inline std::string with_file(const std::string& spec, const ModelShape& shape) {
    const std::string name = spec.substr(0, spec.find(':'));
    for (const MethodInfo* info : methods()) {
        if (info->name != name || !info->calibrated) continue;
        const bool token = spec.find("base=token") != std::string::npos;
        std::string key = name + (token ? " token" : "");
        for (const LayerShape& l : shape.layers)
            for (const int32_t n : {l.heads, l.kv_heads, l.key_dim, l.value_dim})
                key.append(1, ' ').append(std::to_string(n));
        const std::string path = Folder::here().path(key, make(name, shape, token));
        return spec + (spec == name ? ":" : ",") + "calib=" + path;
    }
    return spec;
}

} // namespace kvmosaic::calibrations
