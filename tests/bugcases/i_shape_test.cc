// Bug cases I at the level of shapes and plans: sizes come from the layer, never from hidden size / heads (I1), and
// every layer has its own (I2).
#include <gtest/gtest.h>

#include "kvmosaic/method.h"
#include "unit/methods_calibration.h"

namespace kvmosaic {
namespace {

TEST(BugI1, HeadSizeIsTheLayersOwn) {
    // hidden 5120, 32 heads, head size 128 (not 160); hidden 4096, 48 heads, head size 128 (not 85.3)
    for (const LayerShape& layer : {LayerShape{32, 8, 128, 128}, LayerShape{48, 8, 128, 128}}) {
        const ModelShape shape{{layer}, "m"};
        ASSERT_TRUE(validate(shape).ok());
        for (const MethodInfo* info : methods()) {
            const auto method = open_method(calibrations::with_file(info->name, shape));
            ASSERT_TRUE(method.ok());
            EXPECT_TRUE((*method)->accept(shape).ok());
            for (const Side side : {Side::key, Side::value}) {
                const SidePlan plan = (*method)->initial(side, 0, 0, layer.dim(side));
                EXPECT_EQ(layout(plan.store, side, layer.dim(side), plan.ladder).dim, 128);
            }
        }
    }
}

TEST(BugI1, KeyAndValueSizesAreApart) {
    const LayerShape layer{16, 16, 192, 128};
    EXPECT_EQ(layer.dim(Side::key), 192);
    EXPECT_EQ(layer.dim(Side::value), 128);
    for (const MethodInfo* info : methods()) {
        const auto method = open_method(calibrations::with_file(info->name, {{layer}, "m"}));
        ASSERT_TRUE(method.ok());
        EXPECT_TRUE((*method)->accept({{layer}, "m"}).ok());
        const SidePlan key = (*method)->initial(Side::key, 0, 0, 192);
        if (key.store.kind != StoreKind::tiered) continue;
        EXPECT_EQ(key.channels.size(), key.store.page_map ? 192u : 0u);
        EXPECT_TRUE(validate(key.ladder, 192).ok());
    }
}

TEST(BugI2, EveryLayerHasItsOwnSizes) {
    const ModelShape shape{{{8, 4, 256, 256}, {8, 1, 512, 512}, {0, 0, 0, 0}, {6, 2, 40, 24}}, "m"};
    ASSERT_TRUE(validate(shape).ok());
    for (const MethodInfo* info : methods()) {
        const auto method = open_method(calibrations::with_file(info->name, shape));
        ASSERT_TRUE(method.ok());
        EXPECT_TRUE((*method)->accept(shape).ok()) << info->name;
        for (int32_t l = 0; l < int32_t(shape.layers.size()); ++l) {
            const LayerShape& layer = shape.layers[size_t(l)];
            if (!layer.has_kv()) continue;
            for (const Side side : {Side::key, Side::value}) {
                const int32_t dim = layer.dim(side);
                const SidePlan plan = (*method)->initial(side, l, layer.kv_heads - 1, dim);
                EXPECT_TRUE(validate(plan.store, side, dim).ok());
                EXPECT_EQ(layout(plan.store, side, dim, plan.ladder).dim, dim);
            }
        }
    }
}

// What no method can serve is refused by layer and field before anything is allocated.
TEST(BugI2, AWrongLayerIsNamed) {
    const ModelShape shape{{{8, 4, 64, 64}, {8, 4, 64, 600}}, "m"};
    for (const MethodInfo* info : methods()) {
        const auto method = open_method(calibrations::with_file(info->name, shape));
        ASSERT_TRUE(method.ok());
        const Status s = (*method)->accept(shape);
        ASSERT_FALSE(s.ok()) << info->name;
        EXPECT_NE(s.message().find("layer 1: value_dim must be 1 to 512, not 600"), std::string::npos) << s.message();
    }
}

} // namespace
} // namespace kvmosaic
