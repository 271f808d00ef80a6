// Sequences that move to a device and back are the same to the byte: here with host memory for a device, so that every
// method's pages, raw rows, decisions and statistics make the way on every machine. tests/cuda has the real one.
#include "kvmosaic/device_cache.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <set>

#include "cache/device_impl.h"
#include "cache/state_page.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/order.h"
#include "kernels/cuda/transcode.h"
#include "property/lifecycle.h"

namespace kvmosaic::test {
namespace {

// Poisoned but for what `allocate` promises; counts what is alive.
class HostMemory : public device::Memory {
public:
    size_t limit = SIZE_MAX, used = 0;
    std::set<void*> alive;
    ~HostMemory() override { EXPECT_TRUE(alive.empty()); }
    Result<void*> allocate(size_t bytes) override {
        if (bytes > limit - used) return Status(StatusCode::out_of_memory, "host memory is full");
        used += bytes;
        void* at = std::calloc(bytes + 1, 1);
        alive.insert(at);
        return at;
    }
    void free(void* at) override {
        alive.erase(at);
        std::free(at);
    }
    Status copy_in(void* to, const void* from, size_t bytes) override { return copy(to, from, bytes); }
    Status copy_out(void* to, const void* from, size_t bytes) override { return copy(to, from, bytes); }
    Status copy(void* to, const void* from, size_t bytes) override {
        if (bytes > 0) std::memmove(to, from, bytes);
        return {};
    }
};

ModelShape shape_of(int32_t dim) {
    ModelShape shape = one_layer(4, 2, dim, dim, 3);
    shape.layers[1] = {}; // borrows
    return shape;
}

// Layers with K/V get the same rows.
void grow(Cache& cache, const Text& text, int64_t from, int64_t n, SeqId seq) {
    std::vector<StepRow> rows;
    for (int64_t t = 0; t < n; ++t)
        rows.push_back({int32_t(2 * (from + t)), {&seq, 1}});
    ASSERT_TRUE(cache.begin_step(rows).ok());
    for (int32_t l = 0; l < int32_t(cache.shape().layers.size()); ++l)
        if (cache.shape().layers[size_t(l)].has_kv())
            cache.write(l, text.q.rows(from), text.k.rows(from), text.v.rows(from));
    cache.end_step();
}

std::unique_ptr<device::DeviceCache> on_device(const Cache& cache, HostMemory* memory, int32_t slots, int64_t rows,
                                               double bits = 0.0) {
    auto like = Cache::create(cache.shape(), cache.method().spec());
    EXPECT_TRUE(like.ok());
    auto made = device::DeviceCache::create(std::move(*like), {slots, rows, bits, 1, 2}, memory);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? std::move(*made) : nullptr;
}

TEST(DeviceCache, EveryMethodComesBackToTheByte) {
    for (const int32_t dim : {64, 80}) {
        const ModelShape shape = shape_of(dim);
        const Text text(shape.layers[0], 600);
        for (const std::string& spec : lifecycle_specs()) {
            if (spec == "f32") continue;
            auto cache = make(shape, spec);
            ASSERT_TRUE(cache);
            HostMemory memory;
            {
                auto moved = on_device(*cache, &memory, 4, 600);
                ASSERT_TRUE(moved) << spec;
                const int64_t lengths[] = {3, 131, 388, 600};
                for (SeqId s = 0; s < 4; ++s) {
                    grow(*cache, text, 0, lengths[s], s);
                    const Status up = moved->upload(3 - s, *cache, s);
                    ASSERT_TRUE(up.ok()) << spec << ": " << up.message();
                    ASSERT_EQ(lengths[s], *moved->rows(3 - s));
                }
                auto back = make(shape, spec);
                for (SeqId s = 0; s < 4; ++s) {
                    const Status down = moved->download(3 - s, back.get(), s + 10);
                    ASSERT_TRUE(down.ok()) << spec << ": " << down.message();
                    ASSERT_EQ(cache->save(s), back->save(s + 10)) << spec << ", D " << dim << ", sequence " << s;
                }
                // What came back goes on as if it had never been away.
                grow(*cache, text, 388, 200, 2);
                grow(*back, text, 388, 200, 12);
                ASSERT_EQ(cache->save(2), back->save(12)) << spec;
                EXPECT_EQ(moved->bytes(), int64_t(memory.used)) << spec;
            }
            EXPECT_TRUE(memory.alive.empty()) << spec;
        }
    }
}

// Behind a removal all rows wait raw, more than the ring of recent rows holds.
TEST(DeviceCache, RefusesRowsThatWaitToBePacked) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 700);
    auto cache = make(shape, "kivi:bits=2"), back = make(shape, "kivi:bits=2");
    grow(*cache, text, 0, 600, 0);
    ASSERT_TRUE(cache->remove_rows(0, 8, 16).ok());
    HostMemory memory;
    auto moved = on_device(*cache, &memory, 1, 700);
    const Status up = moved->upload(0, *cache, 0);
    ASSERT_FALSE(up.ok());
    EXPECT_NE(std::string::npos, up.message().find("raw rows that wait to be packed")) << up.message();
    grow(*cache, text, 600, 1, 0);
    ASSERT_TRUE(moved->upload(0, *cache, 0).ok());
    ASSERT_TRUE(moved->download(0, back.get(), 0).ok());
    EXPECT_EQ(cache->save(0), back->save(0));
}

TEST(DeviceCache, LaddersAreReadFromTheMapsOfPages) {
    const ModelShape shape = one_layer(4, 2, 96);
    const Text text(shape.layers[0], 400);
    for (const std::string spec : {"mixkvq:hi=1.2,mid=0.5", "mixkvq:hi=9,mid=9", "mixkvq:hi=0,mid=0", "kitty"}) {
        auto cache = make(shape, spec);
        grow(*cache, text, 0, 400, 0);
        const std::vector<uint8_t> widths = cache->method().widths(Side::key);
        ASSERT_GT(cache->pages(0, 0, Side::key), 0);
        for (int32_t h = 0; h < 2; ++h)
            for (int64_t p = 0; p < cache->pages(0, 0, Side::key); ++p) {
                const PageView page = cache->page(0, 0, h, Side::key, p);
                std::vector<uint8_t> bytes(cuda::device_page(*page.layout).bytes);
                cuda::to_device_order(*page.layout, page.bytes, bytes.data());
                const Ladder want = state::ladder_of(*page.layout);
                EXPECT_EQ(want, device::ladder_of_device_page(cache->plan(0, 0, h, Side::key).store, 96, widths,
                                                              device::ladder_code(want, widths), bytes.data()))
                    << spec << ", head " << h << ", page " << p;
            }
    }
}

// Pages that differ in size share a pool: slots come and go, and holes are closed when room is needed.
TEST(DeviceCache, PoolsCloseTheirHoles) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 700);
    for (const std::string spec : {"mixkvq", "mosaic", "pnmix"}) {
        auto cache = make(shape, spec);
        HostMemory memory;
        auto moved = on_device(*cache, &memory, 4, 700, spec == "mixkvq" ? 2.4 : spec == "mosaic" ? 1.3 : 1.6);
        ASSERT_TRUE(moved);
        for (SeqId s = 0; s < 4; ++s)
            grow(*cache, text, 0, 300 + 90 * s, s);
        std::mt19937 random(5);
        std::vector<SeqId> at(4, -1);
        int refused = 0;
        for (int i = 0; i < 60; ++i) {
            const auto slot = int32_t(random() % 4);
            const auto seq = SeqId(random() % 4);
            if (random() % 3 == 0) {
                ASSERT_TRUE(moved->clear(slot).ok());
                at[size_t(slot)] = -1;
            } else if (const Status up = moved->upload(slot, *cache, seq); up.ok()) {
                at[size_t(slot)] = seq;
            } else {
                ASSERT_EQ(StatusCode::out_of_capacity, up.code()) << up.message();
                EXPECT_NE(std::string::npos, up.message().find("expected_bits")) << up.message();
                ++refused;
            }
            for (int32_t s = 0; s < 4; ++s) {
                if (at[size_t(s)] < 0) {
                    EXPECT_EQ(0, *moved->rows(s));
                    continue;
                }
                auto back = make(shape, spec);
                const Status down = moved->download(s, back.get(), 0);
                ASSERT_TRUE(down.ok()) << down.message();
                ASSERT_EQ(cache->save(at[size_t(s)]), back->save(0)) << spec << ", after " << i << " operations";
            }
        }
        EXPECT_GT(refused, 0) << spec << ": the pool was meant to be tight";
        EXPECT_LT(refused, 30) << spec;
    }
}

TEST(DeviceCache, RefusesByName) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 300);
    HostMemory memory;
    auto cache = make(shape, "mixkvq");
    grow(*cache, text, 0, 300, 0);
    const auto words = [](const Status& s) { return s.ok() ? std::string("ok") : s.message(); };
    const auto create = [&](const std::string& spec, device::DeviceCacheOptions o) {
        auto made = device::DeviceCache::create(make(shape, spec), o, &memory);
        return words(made.status());
    };
    EXPECT_NE(std::string::npos, create("mixkvq", {0, 10, 0}).find("slots = 0: must be 1 to"));
    EXPECT_NE(std::string::npos, create("mixkvq", {1, 0, 0}).find("max_rows = 0: must be 1 to"));
    EXPECT_NE(std::string::npos, create("mixkvq", {1, 10, -1}).find("expected_bits"));
    EXPECT_NE(std::string::npos, create("mixkvq", {1, 10, std::nan("")}).find("expected_bits"));
    EXPECT_NE(std::string::npos, create("mixkvq", {1, 10, 0, 129}).find("step_rows = 129: must be 1 to"));
    EXPECT_NE(std::string::npos, create("mixkvq", {1, 10, 0, 1, 0}).find("threads = 0: must be 1 to"));
    EXPECT_NE(std::string::npos, create("f32", {1, 10, 0}).find("f16 or bf16"));
    EXPECT_NE(std::string::npos,
              words(device::DeviceCache::create(shape, "nothing", {1, 10, 0}).status()).find("nothing"));
    auto full = make(shape, "mixkvq");
    grow(*full, text, 0, 10, 0);
    EXPECT_NE(
        std::string::npos,
        words(device::DeviceCache::create(std::move(full), {1, 10, 0}, &memory).status()).find("holds sequences"));
    memory.limit = memory.used + 10000;
    EXPECT_NE(std::string::npos, create("mixkvq", {4, 4096, 0}).find("memory is full"));
    memory.limit = SIZE_MAX;

    auto moved = on_device(*cache, &memory, 2, 256);
    EXPECT_NE(std::string::npos, words(moved->upload(2, *cache, 0)).find("slot = 2: must be 0 to 1"));
    EXPECT_NE(std::string::npos, words(moved->upload(0, *cache, 7)).find("no sequence 7"));
    EXPECT_NE(std::string::npos, words(moved->upload(0, *cache, 0)).find("has 300 rows, max_rows is 256"));
    ASSERT_TRUE(cache->truncate(0, 200).ok());
    auto other = make(shape, "mixkvq:v=4");
    grow(*other, text, 0, 100, 0);
    EXPECT_NE(std::string::npos, words(moved->upload(0, *other, 0)).find("mixkvq:v=4"));
    EXPECT_NE(std::string::npos, words(moved->download(0, cache.get(), 1)).find("slot 0 is empty"));
    ASSERT_TRUE(moved->upload(0, *cache, 0).ok());
    EXPECT_NE(std::string::npos, words(moved->download(0, other.get(), 1)).find("spec"));
    const int32_t one[] = {900};
    EXPECT_NE(std::string::npos, words(moved->download(0, cache.get(), 1, one)).find("has 0 new rows, 1 positions"));
    // A device that lies: states that contradict what came.
    moved->states(0)[0].rows = 100;
    EXPECT_NE(std::string::npos, words(moved->download(0, cache.get(), 1)).find("100 rows"));
    moved->states(0)[0].rows = 201; // grew, but nobody counted its query
    EXPECT_NE(std::string::npos, words(moved->download(0, cache.get(), 1)).find("add_queries"));
    moved->states(0)[0].rows = 200;
    moved->states(0)[0].key_packed = 4096;
    EXPECT_NE(std::string::npos, words(moved->download(0, cache.get(), 1)).find("4096 of 200 rows are packed"));
    EXPECT_EQ(0, cache->rows(1));
}

// What `to_key_basis` needs of each head comes with the sequence; what it cannot do is said by name.
TEST(DeviceCache, BasesOfKeysComeAlong) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 300);
    for (const std::string spec : {"kivi:bits=2", "mixkvq", "innerq", "pnmix", "turboquant:skip=0"}) {
        auto cache = make(shape, spec);
        grow(*cache, text, 0, 300, 0);
        HostMemory memory;
        auto moved = on_device(*cache, &memory, 2, 300);
        ASSERT_TRUE(moved->upload(1, *cache, 0).ok());
        const auto basis = moved->key_basis(0);
        ASSERT_TRUE(basis.ok()) << spec;
        const auto kernel = moved->attention(0, 3);
        ASSERT_TRUE(kernel.ok()) << spec;
        EXPECT_EQ(basis->any(), kernel->key_basis);
        EXPECT_EQ(3, kernel->rows);
        EXPECT_EQ(2, kernel->max_sequences);
        for (int32_t h = 0; h < 2; ++h) {
            const Transform& t = cache->plan(0, 0, h, Side::key).transform;
            EXPECT_EQ(t.hadamard, basis->hadamard) << spec;
            EXPECT_EQ(t.identity(), !basis->any()) << spec;
            for (int32_t d = 0; d < 64; ++d) {
                const size_t at = size_t((1 * 2 + h) * 64 + d);
                if (basis->factor) {
                    EXPECT_EQ(t.scale.empty() ? 1.0f : t.scale[size_t(d)], basis->factor[at]) << spec;
                }
                if (basis->order) {
                    EXPECT_EQ(t.order.empty() ? d : t.order[size_t(d)], basis->order[at]) << spec;
                }
            }
            EXPECT_TRUE(t.scale.empty() || basis->factor) << spec;
            EXPECT_TRUE(t.order.empty() || basis->order) << spec;
        }
    }
    // Means come with what products with them need; positions that kernels could not turn them by are said.
    HostMemory memory;
    auto cache = make(shape, "mosaic");
    auto moved = on_device(*cache, &memory, 1, 300);
    EXPECT_TRUE(moved->attention(0).ok());
    const device::KeyMean mean = moved->key_mean(0);
    ASSERT_NE(nullptr, mean.mean);
    EXPECT_EQ(8 * (mean.fast_steps + mean.slow_steps), mean.slots);
    test::write_layers(*cache, text, 0, 300, 1);
    cache->end_step();
    ASSERT_TRUE(moved->upload(0, *cache, 0).ok());
    for (int32_t h = 0; h < 2; ++h) { // each component once, in the order of the pairs
        std::multiset<float> want, got;
        for (const float x : cache->plan(0, 0, h, Side::key).mean)
            want.insert(x);
        int32_t none = 0;
        for (int32_t i = 0; i < mean.slots; ++i) {
            const uint32_t pair = mean.mean[h * mean.slots + i];
            if (none += pair == 0; pair == 0) continue;
            got.insert(f16_to_f32(uint16_t(pair))), got.insert(f16_to_f32(uint16_t(pair >> 16)));
        }
        EXPECT_EQ(mean.slots - 32, none);
        EXPECT_EQ(want, got);
    }
    EXPECT_TRUE(moved->attention(0).ok());
    auto apart = make(shape, "mosaic");
    grow(*apart, text, 0, 300, 0); // at every other position
    ASSERT_TRUE(moved->clear(0).ok());
    ASSERT_TRUE(moved->upload(0, *apart, 0).ok());
    EXPECT_NE(std::string::npos,
              moved->attention(0).status().message().find("slot 0 cannot be attended: its rows are not at positions"));
    ASSERT_TRUE(moved->clear(0).ok());
    EXPECT_TRUE(moved->attention(0).ok());
    auto joined = on_device(*make(shape, "kvquant"), &memory, 1, 300);
    EXPECT_FALSE(joined->attention(0).ok());
}

} // namespace
} // namespace kvmosaic::test
