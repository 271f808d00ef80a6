// Cache::create with a method of one's own: it decides, is refused where its plans cannot be, and names saved states.
#include "rig.h"

namespace kvmosaic::test {
namespace {

// KIVI whose windows are what the test says.
class Windowed final : public Method {
public:
    Windowed(Window window, std::string name)
        : inner_(std::move(*open_method("kivi:bits=4,group=64"))), window_(window) {
        if (!name.empty()) set_spec(std::move(name));
    }
    const MethodInfo& info() const override { return inner_->info(); }
    SidePlan initial(Side side, int32_t layer, int32_t head, int32_t dim) const override {
        SidePlan plan = inner_->initial(side, layer, head, dim);
        plan.window = window_;
        return plan;
    }

private:
    std::unique_ptr<Method> inner_;
    Window window_;
};

Result<std::unique_ptr<Cache>> create(const ModelShape& shape, Window window, std::string name = "windowed") {
    CacheOptions options;
    options.poison = true;
    return Cache::create(shape, std::make_unique<Windowed>(window, std::move(name)), options);
}

TEST(OwnMethod, ItsWindowsAreUsed) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 300, 3);
    auto cache = create(shape, {.front = 0, .keep = 0, .flush = 64});
    ASSERT_TRUE(cache.ok()) << cache.status().message();
    const auto out = feed(**cache, text, 0, 300);
    for (const Side side : {Side::key, Side::value})
        EXPECT_EQ((*cache)->packed_rows(0, 0, side), 256);
    EXPECT_EQ((*cache)->method().spec(), "windowed");
    EXPECT_LT(error_of(out.data() + 299 * 4 * 64, expected(**cache, text, 299, 0, 300)), bound_of(**cache));
}

TEST(OwnMethod, APlanThatCannotBeIsRefused) {
    const ModelShape shape = one_layer(4, 2, 64);
    const auto cache = create(shape, {.front = 0, .keep = 0, .flush = 32});
    ASSERT_FALSE(cache.ok());
    EXPECT_EQ(cache.status().code(), StatusCode::invalid_argument);
    EXPECT_NE(cache.status().message().find("flush=32"), std::string::npos) << cache.status().message();

    const auto none = Cache::create(shape, std::unique_ptr<Method>());
    ASSERT_FALSE(none.ok());
    EXPECT_NE(none.status().message().find("method"), std::string::npos);

    const auto shapeless = Cache::create(ModelShape(), std::make_unique<Windowed>(Window{.flush = 64}, "windowed"));
    EXPECT_FALSE(shapeless.ok());
}

TEST(OwnMethod, SavedStatesAreBoundToItsName) {
    const ModelShape shape = one_layer(4, 2, 64);
    const Text text(shape.layers[0], 200, 3);
    const Window window{.front = 0, .keep = 0, .flush = 64};
    auto from = create(shape, window), same = create(shape, window), other = create(shape, window, "another");
    ASSERT_TRUE(from.ok() && same.ok() && other.ok());
    feed(**from, text, 0, 200);
    const std::vector<uint8_t> bytes = (*from)->save(0);
    EXPECT_TRUE((*same)->load(0, bytes).ok());
    EXPECT_TRUE((*same)->save(0) == bytes);
    const Status refused = (*other)->load(0, bytes);
    ASSERT_FALSE(refused.ok());
    EXPECT_NE(refused.message().find("windowed"), std::string::npos) << refused.message();
    EXPECT_NE(refused.message().find("another"), std::string::npos) << refused.message();
}

} // namespace
} // namespace kvmosaic::test
