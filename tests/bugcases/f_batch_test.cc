// Rows of several sequences in one step, and views of wider buffers, for every method (F1, F4, F6, C2, C14).
#include "kernels/kernels.h"
#include "rig.h"

namespace kvmosaic::test {
namespace {

// F1, F4: there is no padding to enter statistics, masks or groups: texts of 37 and 300 tokens, query groups of 4, in
// one step and then token by token together, give the bytes and outputs of each alone.
TEST(BugCaseF1, BatchesOfUnevenTextsEqualEachAlone) {
    const ModelShape shape = one_layer(4, 1, 64);
    const LayerShape& l = shape.layers[0];
    const AttendArgs args{.scale = default_scale(l)};
    for (const std::string& spec : all_specs()) {
        const Text a(l, 200, 1), b(l, 460, 2);
        auto together = make(shape, spec), alone_a = make(shape, spec), alone_b = make(shape, spec);
        const SeqId ids[2] = {0, 1};
        int64_t at_a = 0, at_b = 0;
        const auto step = [&](int64_t n_a, int64_t n_b) { // rows of both, taken in turn
            const int64_t n = n_a + n_b;
            Tensor q(n, l.heads, 64), k(n, l.kv_heads, 64), v(n, l.kv_heads, 64);
            std::vector<StepRow> rows;
            std::vector<int> owner;
            for (int64_t i = 0, i_a = 0, i_b = 0; i < n; ++i) {
                const bool first = i_b >= n_b || (i_a < n_a && i % 2 == 0);
                const Text& text = first ? a : b;
                const int64_t t = first ? at_a + i_a++ : at_b + i_b++;
                rows.push_back({int32_t(t), {&ids[first ? 0 : 1], 1}});
                owner.push_back(first ? 0 : 1);
                std::copy_n(text.q.at(t, 0), l.heads * 64, q.at(i, 0));
                std::copy_n(text.k.at(t, 0), l.kv_heads * 64, k.at(i, 0));
                std::copy_n(text.v.at(t, 0), l.kv_heads * 64, v.at(i, 0));
            }
            std::vector<float> out(size_t(n) * size_t(l.heads) * 64), got[2];
            ASSERT_TRUE(together->append_and_attend(0, rows, q.rows(), k.rows(), v.rows(), args, out.data()).ok());
            for (int64_t i = 0; i < n; ++i)
                got[owner[size_t(i)]].insert(got[owner[size_t(i)]].end(), out.begin() + i * l.heads * 64,
                                             out.begin() + (i + 1) * l.heads * 64);
            EXPECT_TRUE(got[0] == feed(*alone_a, a, at_a, n_a)) << spec << " at " << at_a;
            EXPECT_TRUE(got[1] == feed(*alone_b, b, at_b, n_b)) << spec << " at " << at_b;
            at_a += n_a, at_b += n_b;
        };
        step(37, 300);
        for (int i = 0; i < 40; ++i)
            step(1, 1);
        step(120, 60);
        EXPECT_TRUE(together->save(0) == alone_a->save(0)) << spec;
        EXPECT_TRUE(together->save(1) == alone_b->save(0)) << spec;
    }
}

// F6: rows lie in a workspace for larger heads whose tails hold 10,000; nothing of a tail may reach a scale.
TEST(BugCaseF6, TailsOfWiderRowsAreNotRead) {
    const ModelShape shape = one_layer(4, 2, 80);
    const LayerShape& l = shape.layers[0];
    const Text text(l, 300, 3);
    const auto widen = [](const Tensor& from, std::vector<float>* wide) {
        constexpr int64_t kWide = 512;
        const int64_t rows = int64_t(from.x.size()) / (from.heads * from.dim);
        wide->assign(size_t(rows * from.heads * kWide), 10000.0f);
        for (int64_t r = 0; r < rows; ++r)
            for (int32_t h = 0; h < from.heads; ++h)
                std::copy_n(from.at(r, h), from.dim, wide->data() + (r * from.heads + h) * kWide);
        return RowsF32{wide->data(), from.heads * kWide, kWide};
    };
    std::vector<float> q, k, v;
    const RowsF32 wide_q = widen(text.q, &q), wide_k = widen(text.k, &k), wide_v = widen(text.v, &v);
    const AttendArgs args{.scale = default_scale(l)};
    const SeqId seq = 0;
    std::vector<StepRow> rows;
    for (int32_t t = 0; t < 300; ++t)
        rows.push_back({t, {&seq, 1}});
    for (const std::string& spec : all_specs()) {
        auto dense = make(shape, spec), wide = make(shape, spec);
        const std::vector<float> want = feed(*dense, text, 0, 300);
        std::vector<float> got(want.size());
        ASSERT_TRUE(wide->append_and_attend(0, rows, wide_q, wide_k, wide_v, args, got.data()).ok());
        EXPECT_TRUE(got == want) << spec;
        EXPECT_TRUE(wide->save(0) == dense->save(0)) << spec;
    }
}

// C2: values whose head size no block divides, with more query heads than KV heads: one output row a query head.
TEST(BugCaseC2, OutputRowsAreCountedByQueryHeads) {
    for (const auto& [heads, kv_heads] : {std::pair(24, 4), std::pair(32, 8)}) {
        const ModelShape shape = one_layer(heads, kv_heads, 40, 20);
        Text text(shape.layers[0], 140, 4);
        for (int64_t t = 0; t < 140; ++t) // every KV head's values are one constant of its own
            for (int32_t g = 0; g < kv_heads; ++g)
                std::fill_n(text.v.at(t, g), 20, float(g + 1));
        for (const std::string spec : {"kivi:bits=2", "mixkvq", "kitty", "innerq:norm=off", "q8_0", "pnmix:front=4"}) {
            auto cache = make(shape, spec);
            const std::vector<float> out = feed(*cache, text, 0, 140);
            for (int64_t t = 0; t < 140; t += 139)
                for (int32_t h = 0; h < heads; ++h)
                    for (int32_t d = 0; d < 20; ++d)
                        ASSERT_NEAR(out[size_t((t * heads + h) * 20 + d)], float(h / (heads / kv_heads) + 1), 0.01)
                            << spec << " head " << h;
        }
    }
}

// C14: every page that a method makes decodes to the reference's bits on every table of this machine.
TEST(BugCaseC14, EveryTableDecodesEveryMethodsPagesAlike) {
    for (const int32_t dim : {64, 80, 128}) {
        const ModelShape shape = one_layer(4, 2, dim);
        const Text text(shape.layers[0], 420, 5);
        for (const std::string& spec : all_specs()) {
            auto cache = make(shape, spec);
            feed(*cache, text, 0, 420);
            for (const Side side : {Side::key, Side::value})
                for (int64_t p = 0; p < cache->pages(0, 0, side); ++p) {
                    const PageView page = cache->page(0, 0, 1, side, p);
                    std::vector<float> want(size_t(page.rows) * size_t(dim)), got(want.size());
                    kernels::reference().restore(*page.layout, page.bytes, 0, page.rows, want.data(), dim);
                    for (const kernels::Table* table : kernels::available()) {
                        table->restore(*page.layout, page.bytes, 0, page.rows, got.data(), dim);
                        EXPECT_EQ(0, std::memcmp(got.data(), want.data(), got.size() * sizeof(float)))
                            << spec << ", D " << dim << ", " << name_of(side) << " page " << p << ", " << table->isa;
                    }
                }
        }
    }
}

} // namespace
} // namespace kvmosaic::test
