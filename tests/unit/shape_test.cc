#include "kvmosaic/shape.h"

#include <gtest/gtest.h>

#include "kvmosaic/store.h"

namespace kvmosaic {
namespace {

ModelShape shape_of(std::vector<LayerShape> layers) { return {std::move(layers), "m"}; }

TEST(Shape, Accepts) {
    EXPECT_TRUE(validate(shape_of({{9, 3, 64, 64}})).ok());
    EXPECT_TRUE(validate(shape_of({{1, 1, 1, 1}, {71, 1, 512, 512}})).ok());
    EXPECT_TRUE(validate(shape_of({{0, 0, 0, 0}, {8, 8, 192, 128}})).ok()); // a layer without K/V between others
}

TEST(Shape, NamesLayerFieldAndRange) {
    const std::vector<std::pair<LayerShape, std::string>> wrong = {
        {{8, -1, 64, 64}, "m: layer 1: kv_heads must be 0 to 65536, not -1"},
        {{0, 4, 64, 64}, "m: layer 1: heads must be 1 to 65536, not 0"},
        {{6, 4, 64, 64}, "m: layer 1: heads must be a multiple of kv_heads, not 6 with kv_heads 4"},
        {{2, 4, 64, 64}, "m: layer 1: heads must be a multiple of kv_heads, not 2 with kv_heads 4"},
        {{8, 4, 0, 64}, "m: layer 1: key_dim must be 1 to 512, not 0"},
        {{8, 4, 64, 513}, "m: layer 1: value_dim must be 1 to 512, not 513"},
    };
    for (const auto& [layer, message] : wrong) {
        const Status s = validate(shape_of({{8, 4, 64, 64}, layer}));
        ASSERT_FALSE(s.ok()) << message;
        EXPECT_EQ(s.code(), StatusCode::invalid_argument);
        EXPECT_EQ(s.message(), message);
    }
}

TEST(Shape, SomeLayerMustKeepKeysAndValues) {
    for (const ModelShape& shape : {shape_of({}), shape_of({{8, 0, 64, 64}, {8, 0, 64, 64}})}) {
        const Status s = validate(shape);
        ASSERT_FALSE(s.ok());
        EXPECT_NE(s.message().find("none of the " + std::to_string(shape.layers.size()) + " layers"),
                  std::string::npos);
    }
}

TEST(Shape, HeadSizeLimitIsThatOfTheStores) {
    EXPECT_TRUE(validate(shape_of({{1, 1, kMaxHeadDim, kMaxHeadDim}})).ok());
    EXPECT_FALSE(validate(shape_of({{1, 1, kMaxHeadDim + 1, kMaxHeadDim}})).ok());
}

} // namespace
} // namespace kvmosaic
