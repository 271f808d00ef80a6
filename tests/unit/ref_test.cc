// The reference kernels against values worked out by hand.
#include "unit/codec_rules.h"

namespace kvmosaic {
namespace {

using kernels::Counters;
using kernels::reference;
using kernels::RowState;
using namespace testing;

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Ref, ValueRowByHand) {
    const PageLayout page = layout(grid_spec(Side::value, 2, 8), Side::value, 8);
    Page bytes(page);
    // min 1, max 4: s = 1, z = 1; 1.5 and 2.5 are ties and go to the even codes 0 and 2.
    const float row[8] = {1.0f, 1.5f, 2.5f, 4.0f, 3.0f, 2.0f, 1.4f, 3.6f};
    reference().encode(page, nullptr, row, 5, 1, bytes.bytes());
    EXPECT_EQ(scale_at(bytes, 0, 5), 1.0f);
    EXPECT_EQ(zero_at(bytes, 0, 5), 1.0f);
    const int codes[8] = {0, 0, 2, 3, 2, 1, 0, 3};
    for (int c = 0; c < 8; ++c) {
        // Token 5: byte 1 of the channel's word, second field.
        EXPECT_EQ((bytes.bytes()[4 * c + 1] >> 2) & 3, codes[c]) << c;
        EXPECT_EQ(bytes.bytes()[4 * c + 1] & ~(3 << 2), 0) << c;
    }
    float back[8];
    reference().restore(page, bytes.bytes(), 5, 1, back, 8);
    for (int c = 0; c < 8; ++c)
        EXPECT_EQ(back[c], 1.0f + float(codes[c])) << c;
}

TEST(Ref, CodesComeFromTheStoredScale) {
    // (max - min) / 3 = 0.1 is not an f16: the stored scale is 0.099975586.
    const PageLayout page = layout(grid_spec(Side::value, 2, 8), Side::value, 8);
    Page bytes(page);
    const float row[8] = {0.0f, 0.3f, 0.1f, 0.2f, 0.0f, 0.0f, 0.0f, 0.0f};
    reference().encode(page, nullptr, row, 0, 1, bytes.bytes());
    const float s = f16_to_f32(f32_to_f16(0.3f / 3.0f));
    EXPECT_EQ(scale_at(bytes, 0, 0), s);
    float back[8];
    reference().restore(page, bytes.bytes(), 0, 1, back, 8);
    EXPECT_EQ(back[1], 3.0f * s);
    EXPECT_EQ(back[2], s);
    EXPECT_EQ(back[3], 2.0f * s);
}

// One group by hand, x = -1, -0.2, 0.4, 3, as the second of two unequal groups: codes and values of every rule.
TEST(Ref, OneGroupUnderEveryRule) {
    static const uint16_t edges[3] = {0, 4, 8};
    static const float book[4] = {-1.0f, -0.25f, 0.25f, 0.75f};
    struct Want {
        GridRule rule;
        int bits, levels;
        float clip;
        std::vector<float> values; // exact where the numbers are
        float s;                   // as stored
    };
    const float seventh = f16_to_f32(f32_to_f16(4.0f / 7.0f)), third = f16_to_f32(f32_to_f16(4.0f / 3.0f));
    const std::vector<Want> all = {
        {GridRule::asym, 3, 0, 1.0f, {-1.0f, -1.0f + seventh, -1.0f + 2 * seventh, -1.0f + 7 * seventh}, seventh},
        {GridRule::asym, 2, 0, 1.0f, {-1.0f, -1.0f + third, -1.0f + third, -1.0f + 3 * third}, third},
        {GridRule::asym, 1, 0, 1.0f, {-1.0f, -1.0f, -1.0f, 3.0f}, 4.0f},
        {GridRule::asym, 2, 3, 1.0f, {-1.0f, -1.0f, 1.0f, 3.0f}, 2.0f},
        {GridRule::asym, 1, 0, 0.5f, {-0.5f, -0.5f, -0.5f, 1.5f}, 2.0f},
        {GridRule::midpoint, 1, 0, 1.0f, {0.0f, 0.0f, 0.0f, 2.0f}, 2.0f},
        {GridRule::integer, 1, 0, 1.0f, {0.0f, 0.0f, 0.0f, 4.0f}, 4.0f}, // -1 / 4 is no whole step: n = 0
        {GridRule::integer, 2, 3, 1.0f, {}, 0.0f},                       // no such page
        {GridRule::symmetric, 3, 0, 1.0f, {-1.0f, 0.0f, 0.0f, 3.0f}, 1.0f},
        {GridRule::symmetric, 2, 0, 1.0f, {0.0f, 0.0f, 0.0f, 3.0f}, 3.0f},
        {GridRule::symmetric, 2, 3, 1.0f, {0.0f, 0.0f, 0.0f, 3.0f}, 3.0f},
        {GridRule::extreme, 2, 0, 1.0f, {-1.5f, 0.0f, 0.0f, 3.0f}, -1.5f},   // -1 / 1.5 rounds to one step
        {GridRule::hybrid_1bit, 2, 0, 1.0f, {0.0f, 0.0f, 0.0f, 3.0f}, 3.0f}, // 1.6 against 2.2
        {GridRule::codebook_range, 2, 0, 1.0f, {-1.0f, 0.5f, 0.5f, 2.5f}, 2.0f},
        {GridRule::codebook_fixed, 2, 0, 1.0f, {-1.0f, -0.25f, 0.25f, 0.75f}, 1.0f},
    };
    const float x[8] = {5.0f, 5.0f, 5.0f, 5.0f, -1.0f, -0.2f, 0.4f, 3.0f};
    for (const Want& want : all) {
        StoreSpec spec = grid_spec(Side::value, want.bits, 8);
        spec.rule = want.rule, spec.levels = uint8_t(want.levels), spec.clip = want.clip;
        spec.edges = edges, spec.edge_groups = 2;
        if (want.rule >= GridRule::codebook_norm) spec.kind = StoreKind::codebook, spec.book = book;
        if (want.values.empty()) {
            EXPECT_FALSE(validate(spec, Side::value, 8));
            continue;
        }
        for (Side side : {Side::key, Side::value}) {
            ASSERT_TRUE(validate(spec, side, 8)) << validate(spec, side, 8).message();
            const PageLayout page = layout(spec, side, 8);
            for (const kernels::Table* table : tables()) {
                Page bytes(page);
                float back[8];
                table->encode(page, nullptr, x, 77, 1, bytes.bytes());
                table->restore(page, bytes.bytes(), 77, 1, back, 8);
                const std::string what = std::string(table->isa) + " " + testing::name_of(want.rule) + " bits " +
                                         std::to_string(want.bits) + " levels " + std::to_string(want.levels);
                for (int i = 0; i < 4; ++i)
                    EXPECT_EQ(back[4 + i], want.values[size_t(i)]) << what << " " << i;
                if (page.has_scales()) {
                    EXPECT_EQ(scale_at(bytes, 1, 77), want.s) << what;
                }
            }
        }
    }
}

// Outliers: the largest, the smallest, the second largest; ties to the lower channel; beyond 1 alone under fixed
// scales.
TEST(Ref, OutliersByHand) {
    static const float book[2] = {-0.5f, 0.5f};
    const auto slots = [](const StoreSpec& spec, const std::vector<float>& x) {
        const PageLayout page = layout(spec, Side::value, int32_t(x.size()));
        std::vector<std::vector<int>> all;
        for (const kernels::Table* table : tables()) {
            Page bytes(page);
            table->encode(page, nullptr, x.data(), 3, 1, bytes.bytes());
            std::vector<int> found;
            for (uint32_t i = 0; i < page.outliers; ++i) {
                const uint8_t* at = bytes.bytes() + page.outlier_offset + (3u * page.outliers + i) * 4;
                found.push_back(at[0] | at[1] << 8);
                const float value = load(RawType::f16, at + 2, 0);
                EXPECT_EQ(value, found.back() == 0xFFFF ? 0.0f : x[size_t(found.back())]) << table->isa;
            }
            std::vector<float> back(x.size());
            table->restore(page, bytes.bytes(), 3, 1, back.data(), page.dim);
            for (int c : found)
                if (c != 0xFFFF) {
                    EXPECT_EQ(back[size_t(c)], x[size_t(c)]) << table->isa;
                }
            all.push_back(found);
        }
        for (const std::vector<int>& found : all)
            EXPECT_EQ(found, all.front());
        return all.front();
    };
    StoreSpec spec = grid_spec(Side::value, 1, 8);
    spec.kind = StoreKind::codebook;
    spec.book = book;
    spec.rule = GridRule::codebook_range;
    const std::vector<float> x = {1.0f, 4.0f, -2.0f, 4.0f, 3.0f, -2.0f, 0.0f, 2.0f};
    using Channels = std::vector<int>;
    spec.outliers = 1;
    EXPECT_EQ(slots(spec, x), (Channels{1}));
    spec.outliers = 2;
    EXPECT_EQ(slots(spec, x), (Channels{1, 2}));
    spec.outliers = 3;
    EXPECT_EQ(slots(spec, x), (Channels{1, 2, 3}));
    spec.outliers = 4;
    EXPECT_EQ(slots(spec, x), (Channels{1, 2, 3, 5}));
    spec.outliers = 10; // all of them, and two empty slots
    EXPECT_EQ(slots(spec, x), (Channels{0, 1, 2, 3, 4, 5, 6, 7, 0xFFFF, 0xFFFF}));
    spec.rule = GridRule::codebook_fixed;
    EXPECT_EQ(slots(spec, x), (Channels{1, 2, 3, 4, 5, 7, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF}));
    spec.outliers = 2;
    EXPECT_EQ(slots(spec, x), (Channels{1, 3}));
    EXPECT_EQ(slots(spec, {0.5f, -1.0f, 1.0f, 0.0f, -1.5f, 0.25f, 0.0f, 0.0f}), (Channels{4, 0xFFFF}));
}

TEST(Ref, RawChannelsAreF16Exactly) {
    const int32_t dim = 12;
    const PageLayout page = layout(tiered_spec(32), Side::key, dim, ladder_of({{16, 5}, {2, 7}}));
    const std::vector<uint16_t> channels = shuffled_channels(dim);
    std::vector<float> rows = normal_rows(dim, 3, 100.0f);
    const std::vector<float> back = restored(reference(), encoded(reference(), page, channels, rows));
    for (int32_t t = 0; t < kPageTokens; ++t) {
        for (int32_t p = 0; p < 5; ++p)
            EXPECT_EQ(back[size_t(t * dim + channels[size_t(p)])], rows[size_t(t * dim + channels[size_t(p)])]);
    }
}

TEST(Ref, ZeroBitsKeepTheMiddle) {
    const PageLayout page = layout(tiered_spec(64), Side::key, 3, ladder_of({{8, 1}, {0, 2}}));
    const std::vector<uint16_t> channels = {2, 0, 1};
    std::vector<float> rows(kPageTokens * 3);
    for (int32_t t = 0; t < kPageTokens; ++t) {
        rows[size_t(3 * t)] = t < 64 ? 7.0f : float(t % 3); // constant, then 0 .. 2
        rows[size_t(3 * t + 1)] = float(t % 5) - 10.0f;     // -10 .. -6
        rows[size_t(3 * t + 2)] = float(t);
    }
    const Page bytes = encoded(reference(), page, channels, rows);
    const std::vector<float> back = restored(reference(), bytes);
    EXPECT_EQ(back[0], 7.0f);
    EXPECT_EQ(back[3 * 127], 1.0f);
    EXPECT_EQ(back[1], -8.0f);
    EXPECT_EQ(scale_at(bytes, 0, page.coded - 1), 0.0f);
    EXPECT_LE(worst_error(bytes, channels, rows, back), 1.0);
}

TEST(Ref, RawPages) {
    for (RawType type : {RawType::f32, RawType::f16, RawType::bf16}) {
        const PageLayout page = raw_layout(type, Side::key, 6, 4);
        Page bytes(page);
        std::vector<float> rows(24);
        for (size_t i = 0; i < rows.size(); ++i)
            rows[i] = float(i) * 0.5f - 3.0f;
        reference().encode(page, nullptr, rows.data(), 0, 3, bytes.bytes());
        reference().encode(page, nullptr, rows.data() + 18, 3, 1, bytes.bytes());
        std::vector<float> back(24);
        reference().restore(page, bytes.bytes(), 0, 4, back.data(), 6);
        EXPECT_EQ(back, rows) << name_of(type);
        std::fill(back.begin(), back.end(), 0.0f);
        reference().load_raw(type, bytes.bytes(), 4, 6, back.data(), 6);
        EXPECT_EQ(back, rows) << name_of(type);
        EXPECT_TRUE(bytes.guards_intact());
    }
}

TEST(Ref, StoreRawCounts) {
    const float x[7] = {1.0f, NAN, kInf, -kInf, 70000.0f, 65519.0f, 3.4e38f};
    for (const kernels::Table* table : tables()) {
        uint8_t row[28];
        Counters counters;
        table->store_raw(RawType::f16, x, 7, row, &counters);
        EXPECT_EQ(counters.non_finite, 3) << table->isa;
        EXPECT_EQ(counters.saturated, 2) << table->isa;
        const float want[7] = {1.0f, 0.0f, 65504.0f, -65504.0f, 65504.0f, 65504.0f, 65504.0f};
        for (uint32_t i = 0; i < 7; ++i)
            EXPECT_EQ(load(RawType::f16, row, i), want[i]) << table->isa << " " << i;
        // Wider types keep what fits; an infinity becomes the same stand-in, whose products stay finite.
        counters = {};
        table->store_raw(RawType::f32, x, 7, row, &counters);
        EXPECT_EQ(counters.non_finite, 3) << table->isa;
        EXPECT_EQ(counters.saturated, 0) << table->isa;
        const float wide[7] = {1.0f, 0.0f, 65504.0f, -65504.0f, 70000.0f, 65519.0f, 3.4e38f};
        for (uint32_t i = 0; i < 7; ++i)
            EXPECT_EQ(load(RawType::f32, row, i), wide[i]) << table->isa << " " << i;
        counters = {};
        table->store_raw(RawType::bf16, x, 7, row, &counters);
        EXPECT_EQ(counters.non_finite, 3) << table->isa;
        EXPECT_EQ(counters.saturated, 1) << table->isa; // 3.4e38 rounds past the largest bf16
        EXPECT_EQ(load(RawType::bf16, row, 6), 0x1.FEp127f) << table->isa;
    }
}

TEST(Ref, AddAbsRoundsFirst) {
    const float q[4] = {-1.0001f, 2.0f, NAN, kInf};
    float sum[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    reference().add_abs(RawType::f16, q, 4, sum);
    EXPECT_EQ(sum[0], 2.0f); // 1.0001 is 1 in f16
    EXPECT_EQ(sum[1], 3.0f);
    EXPECT_EQ(sum[2], 1.0f);
    EXPECT_EQ(sum[3], 1.0f);
}

// Attention over [n] rows in one piece, in double.
std::vector<double> plain_attention(const std::vector<float>& q, const std::vector<float>& k,
                                    const std::vector<float>& v, int32_t n, int32_t dim, double scale) {
    std::vector<double> s(static_cast<size_t>(n)), out(static_cast<size_t>(dim), 0.0);
    double most = -INFINITY, sum = 0.0;
    for (int32_t t = 0; t < n; ++t) {
        for (int32_t d = 0; d < dim; ++d)
            s[size_t(t)] += scale * double(q[size_t(d)]) * double(k[size_t(t * dim + d)]);
        most = std::max(most, s[size_t(t)]);
    }
    for (double& x : s)
        sum += x = std::exp(x - most);
    for (int32_t t = 0; t < n; ++t) {
        for (int32_t d = 0; d < dim; ++d)
            out[size_t(d)] += s[size_t(t)] / sum * double(v[size_t(t * dim + d)]);
    }
    return out;
}

TEST(Ref, AttentionInPiecesEqualsAttentionAtOnce) {
    const int32_t n = 100, dim = 24;
    Random random(5);
    std::vector<float> q(dim), k(n * dim), v(n * dim);
    for (std::vector<float>* x : {&q, &k, &v})
        for (float& y : *x)
            y = 2.0f * random.normal();
    const std::vector<double> want = plain_attention(q, k, v, n, dim, 0.25);
    for (const kernels::Table* table : tables()) {
        for (const std::vector<int32_t>& edges :
             std::vector<std::vector<int32_t>>{{0, 100}, {0, 1, 50, 50, 100}, {0, 99, 100}}) {
            RowState one{-kInf, 0.0f}, merged{-kInf, 0.0f};
            std::vector<float> o(dim, 0.0f), om(dim, 0.0f);
            for (size_t i = 0; i + 1 < edges.size(); ++i) {
                const int32_t lo = edges[i], m = edges[i + 1] - lo, zero = 0;
                std::vector<float> s(static_cast<size_t>(m) + 1);
                const auto part = [&](RowState* state, std::vector<float>* out) {
                    table->scores(q.data(), 1, k.data() + lo * dim, dim, m, dim, 0.25f, s.data(), m);
                    table->softmax(s.data(), m, state, out->data(), dim);
                    table->mix(s.data(), m, &zero, &m, 1, v.data() + lo * dim, dim, dim, out->data(), dim);
                };
                part(&one, &o); // online
                RowState alone{-kInf, 0.0f};
                std::vector<float> oa(dim, 0.0f);
                part(&alone, &oa); // apart, then merged
                kernels::merge(&merged, om.data(), alone, oa.data(), dim);
            }
            for (int32_t d = 0; d < dim; ++d) {
                EXPECT_NEAR(double(o[size_t(d)] / one.l), want[size_t(d)], 2e-5) << table->isa;
                EXPECT_NEAR(double(om[size_t(d)] / merged.l), want[size_t(d)], 2e-5) << table->isa;
            }
        }
    }
}

TEST(Ref, EmptyPartsChangeNothing) {
    for (const kernels::Table* table : tables()) {
        RowState state{-kInf, 0.0f};
        float o[8] = {};
        table->softmax(nullptr, 0, &state, o, 8);
        EXPECT_EQ(state.m, -kInf) << table->isa;
        EXPECT_EQ(state.l, 0.0f) << table->isa;
        RowState full{2.0f, 3.0f};
        float of[8] = {1, 2, 3, 4, 5, 6, 7, 8};
        kernels::merge(&full, of, state, o, 8);
        EXPECT_EQ(full.m, 2.0f);
        EXPECT_EQ(full.l, 3.0f);
        EXPECT_EQ(of[7], 8.0f);
        table->softmax(nullptr, 0, &full, of, 8);
        EXPECT_EQ(full.l, 3.0f) << table->isa;
        kernels::merge(&state, o, full, of, 8);
        EXPECT_EQ(state.m, 2.0f);
        EXPECT_EQ(state.l, 3.0f);
        EXPECT_EQ(o[7], 8.0f);
    }
}

TEST(Ref, MixStaysInsideItsRange) {
    // p and v outside [lo, hi) are NaN: absent is not the same as probability 0.
    for (const kernels::Table* table : tables()) {
        const float p[2 * 4] = {NAN, 0.5f, 0.25f, NAN, NAN, NAN, NAN, NAN};
        const float v[4 * 8] = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, 1,   1,   1,   1,   1,   1,   1,   1,
                                2,   2,   2,   2,   2,   2,   2,   2,   NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN};
        float o[16] = {};
        const int32_t lo[2] = {1, 2}, hi[2] = {3, 2};
        table->mix(p, 4, lo, hi, 2, v, 8, 8, o, 8);
        EXPECT_EQ(o[0], 1.0f) << table->isa;
        EXPECT_EQ(o[7], 1.0f) << table->isa;
        EXPECT_EQ(o[8], 0.0f) << table->isa;
    }
}

TEST(Ref, MergeIsAssociativeUpToRounding) {
    Random random(9);
    const int32_t dim = 16;
    for (int round = 0; round < 50; ++round) {
        RowState s[3];
        std::vector<float> o[3];
        for (int i = 0; i < 3; ++i) {
            s[i] = RowState{30.0f * random.normal(), random.uniform(1.0f, 50.0f)};
            for (int32_t d = 0; d < dim; ++d)
                o[i].push_back(s[i].l * random.normal());
        }
        RowState left = s[0], right = s[1];
        std::vector<float> ol = o[0], oright = o[1];
        kernels::merge(&left, ol.data(), s[1], o[1].data(), dim);
        kernels::merge(&left, ol.data(), s[2], o[2].data(), dim);
        kernels::merge(&right, oright.data(), s[2], o[2].data(), dim);
        RowState whole = s[0];
        std::vector<float> ow = o[0];
        kernels::merge(&whole, ow.data(), right, oright.data(), dim);
        for (int32_t d = 0; d < dim; ++d)
            EXPECT_NEAR(ol[size_t(d)] / left.l, ow[size_t(d)] / whole.l, 1e-5);
    }
}

} // namespace
} // namespace kvmosaic
