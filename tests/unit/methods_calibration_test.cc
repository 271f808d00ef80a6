// Calibration files: what is written reads back equal, and whatever does not belong is refused by file and field.
#include "unit/methods_calibration.h"

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>

namespace kvmosaic {
namespace {

LayerShape layer(int32_t heads, int32_t kv_heads, int32_t key_dim, int32_t value_dim) {
    return LayerShape{heads, kv_heads, key_dim, value_dim};
}

ModelShape model() {
    ModelShape shape{{layer(8, 2, 64, 32), LayerShape{}, layer(8, 4, 80, 80)}, "some model"};
    shape.fingerprint = "0123abcd";
    return shape;
}

// A file that is gone when the test ends.
class File {
public:
    File() : path(::testing::TempDir() + "kvmosaic-" + std::to_string(std::random_device()()) + ".txt") {}
    ~File() { (void)std::remove(path.c_str()); }
    std::string read() const {
        std::ifstream in(path, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    }
    void write(const std::string& bytes) const { std::ofstream(path, std::ios::binary) << bytes; }
    // Replaces text and repairs the checksum, as somebody would who means it.
    void edit(const std::string& from, const std::string& to) const {
        std::string bytes = read();
        const size_t at = bytes.find(from);
        ASSERT_NE(at, std::string::npos) << from;
        bytes.replace(at, from.size(), to);
        bytes.resize(bytes.rfind("checksum "));
        uint64_t hash = 14695981039346656037u;
        for (const char c : bytes)
            hash = (hash ^ uint8_t(c)) * 1099511628211u;
        char sum[17];
        std::snprintf(sum, sizeof(sum), "%016llx", static_cast<unsigned long long>(hash));
        write(bytes + "checksum " + sum + "\n");
    }
    const std::string path;
};

void expect_refusal(const Status& s, const std::string& path, const std::vector<std::string>& words) {
    ASSERT_FALSE(s.ok());
    EXPECT_NE(s.message().find(path), std::string::npos) << s.message();
    for (const std::string& word : words)
        EXPECT_NE(s.message().find(word), std::string::npos) << "\"" << word << "\" in: " << s.message();
    EXPECT_EQ(s.message().find('\n'), std::string::npos);
}

TEST(Calibration, ReadsBackEqual) {
    const File file;
    Calibration out = calibrations::make("kvquant", model());
    out.tokens = 123456789;
    out.text = "first 100 KiB of some text";
    out.add("odd", -1, -1, Side::value,
            {0.1f, -0.0f, 1.0f / 3.0f, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::max(),
             std::numeric_limits<float>::lowest(), 16777216.0f, 65535.0f});
    out.add("none", 2, 3, Side::key, {});
    ASSERT_TRUE(write_calibration(file.path, out).ok());
    const auto in = read_calibration(file.path);
    ASSERT_TRUE(in.ok()) << in.status().message();
    EXPECT_EQ(in->method, "kvquant");
    EXPECT_EQ(in->fingerprint, "0123abcd");
    EXPECT_EQ(in->tokens, 123456789);
    EXPECT_EQ(in->text, out.text);
    EXPECT_EQ(in->path, file.path);
    ASSERT_EQ(in->layers.size(), 3u);
    for (size_t i = 0; i < 3; ++i)
        EXPECT_TRUE(in->layers[i].same_sizes(model().layers[i])) << i;
    ASSERT_EQ(in->arrays.size(), out.arrays.size());
    for (size_t i = 0; i < out.arrays.size(); ++i) {
        EXPECT_EQ(in->arrays[i].name, out.arrays[i].name);
        EXPECT_EQ(in->arrays[i].layer, out.arrays[i].layer);
        EXPECT_EQ(in->arrays[i].head, out.arrays[i].head);
        EXPECT_EQ(in->arrays[i].side, out.arrays[i].side);
        EXPECT_EQ(in->arrays[i].values, out.arrays[i].values);
    }
    EXPECT_TRUE(std::signbit(in->find("odd", -1, -1, Side::value)->at(1)));
    EXPECT_EQ(in->find("odd", -1, -1, Side::key), nullptr);
    EXPECT_EQ(in->find("odd", 0, -1, Side::value), nullptr);
    EXPECT_TRUE(in->fits(model()).ok());
    // Equal contents are equal bytes, and a file is replaced as a whole.
    const std::string bytes = file.read();
    ASSERT_TRUE(write_calibration(file.path, *in).ok());
    EXPECT_EQ(file.read(), bytes);
    EXPECT_EQ(bytes.rfind("kvmosaic-calibration 1\nmethod kvquant\nmodel 0123abcd\nlayers 3\nlayer 0 8 2 64 32\n", 0),
              0u);
}

TEST(Calibration, ADamagedFileIsRefused) {
    const File file;
    ASSERT_TRUE(write_calibration(file.path, calibrations::make("rotatekv", model())).ok());
    const std::string good = file.read();
    const auto expect_corrupt = [&](const std::string& bytes, const char* what) {
        file.write(bytes);
        const auto read = read_calibration(file.path);
        ASSERT_FALSE(read.ok()) << what;
        expect_refusal(read.status(), file.path, {what});
    };
    for (size_t cut = 0; cut < good.size(); cut += 1 + good.size() / 97) {
        file.write(good.substr(0, cut));
        EXPECT_FALSE(read_calibration(file.path).ok()) << cut;
    }
    std::string flipped = good;
    flipped[good.find("array") + 20] ^= 1;
    expect_corrupt(flipped, "checksum");
    expect_corrupt(good + "x", "checksum");
    expect_corrupt(good.substr(0, good.size() - 1), "checksum");
    expect_corrupt("", "kvmosaic-calibration");
    expect_corrupt("GGUF\n", "kvmosaic-calibration");
    std::string later = good;
    later.replace(good.find(" 1\n"), 3, " 2\n");
    expect_corrupt(later, "version: must be 1 to 1, not \"2\"");
    const auto none = read_calibration(file.path + ".none");
    ASSERT_FALSE(none.ok());
    EXPECT_EQ(none.status().code(), StatusCode::not_found);
}

TEST(Calibration, EveryRecordIsCheckedByField) {
    struct Edit {
        std::string from, to;
        std::vector<std::string> says;
    };
    const std::vector<Edit> edits = {
        {"method rotatekv", "method rotate kv", {"line 2", "method"}},
        {"model 0123abcd", "model", {"line 3", "model"}},
        {"layers 3", "layers 0", {"line 4", "layers", "must be 1 to"}},
        {"layers 3", "layers 4", {"line 8", "layer", "found \"tokens\""}},
        {"layer 1 0", "layer 2 0", {"line 6", "layer", "must be number 1"}},
        {"layer 0 8 2 64 32", "layer 0 8 2 64", {"line 5", "layer", "five numbers"}},
        {"layer 0 8 2 64 32", "layer 0 8 2 -64 32", {"line 5", "layer", "not \"-64\""}},
        {"tokens 1000", "tokens many", {"line 8", "tokens", "not \"many\""}},
        {"text synthetic", "texts synthetic", {"line 9", "text"}},
        {"array order 0 -1 key 128",
         "array order 0 -1 key 127",
         {"array order count", "must be 128 to 128, not \"127\""}},
        {"array order 0 -1 key", "array order 7 -1 key", {"array order layer", "not \"7\""}},
        {"array order 0 -1 key", "array order 0 -1 keys", {"array order side", "key or value"}},
        {"array order 0 -1 key", "array or-der 0 -1 key", {"not a word"}},
        {"array order 0 -1 key 128 ", "array order 0 -1 key 128 nan ", {"array order count"}},
        {"array order 0 -1 key", "matrix order 0 -1 key", {"unknown record", "matrix"}},
    };
    for (const Edit& e : edits) {
        const File file;
        ASSERT_TRUE(write_calibration(file.path, calibrations::make("rotatekv", model())).ok());
        file.edit(e.from, e.to);
        const auto read = read_calibration(file.path);
        ASSERT_FALSE(read.ok()) << e.to;
        EXPECT_EQ(read.status().code(), StatusCode::corrupt);
        expect_refusal(read.status(), file.path, e.says);
    }
}

TEST(Calibration, OnlyWhatReadsBackIsWritten) {
    const File file;
    const auto with = [](auto change) {
        Calibration c = calibrations::make("skvq", model());
        change(&c);
        return c;
    };
    const std::vector<std::pair<Calibration, std::string>> wrong = {
        {with([](Calibration* c) { c->method = "sk vq"; }), "method"},
        {with([](Calibration* c) { c->fingerprint = "a b"; }), "model"},
        {with([](Calibration* c) { c->text = "two\nlines"; }), "text"},
        {with([](Calibration* c) { c->layers.clear(); }), "layers"},
        {with([](Calibration* c) { c->arrays[0].name = "a b"; }), "name"},
        {with([](Calibration* c) { c->arrays[0].values[0] = NAN; }), "not finite"}};
    for (const auto& [calibration, field] : wrong) {
        expect_refusal(write_calibration(file.path, calibration), file.path, {field});
        EXPECT_EQ(file.read(), "") << field;
    }
    expect_refusal(write_calibration("/no such folder/x", calibrations::make("skvq", model())), "/no such folder/x",
                   {"cannot be written"});
}

// F1: the model's own sizes and fingerprint decide, and the sentence names the field that differs.
TEST(Calibration, AForeignModelIsRefusedByField) {
    for (const char* name : {"kvquant", "rotatekv", "skvq", "kvtuner"}) {
        const File file;
        ASSERT_TRUE(write_calibration(file.path, calibrations::make(name, model())).ok());
        const auto accepts = [&](const ModelShape& shape) {
            const auto method = open_method(std::string(name) + ":calib=" + file.path);
            EXPECT_TRUE(method.ok()) << method.status().message();
            return (*method)->accept(shape);
        };
        EXPECT_TRUE(accepts(model()).ok()) << accepts(model()).message();
        ModelShape other = model();
        other.fingerprint = "ffff";
        expect_refusal(accepts(other), file.path, {"model is \"0123abcd\"", "\"ffff\""});
        other.fingerprint = ""; // not known: sizes alone decide
        EXPECT_TRUE(accepts(other).ok());
        other.layers.pop_back();
        expect_refusal(accepts(other), file.path, {"layers is 3", "2"});
        for (int field = 0; field < 4; ++field) {
            other = model();
            LayerShape& l = other.layers[2];
            (field == 0 ? l.heads : field == 1 ? l.kv_heads : field == 2 ? l.key_dim : l.value_dim) *= 2;
            expect_refusal(accepts(other), file.path, {"layer 2", "8 4 80 80"});
        }
    }
    const File unknown;
    Calibration file = calibrations::make("skvq", model());
    file.fingerprint = "unknown";
    ASSERT_TRUE(write_calibration(unknown.path, file).ok());
    EXPECT_TRUE((*open_method("skvq:calib=" + unknown.path))->accept(model()).ok());
}

TEST(Calibration, AFileOfAnotherMethodIsRefused) {
    for (const char* name : {"kvquant", "rotatekv", "skvq", "kvtuner"}) {
        const File file;
        const std::string other = std::string(name) == "skvq" ? "kvquant" : "skvq";
        ASSERT_TRUE(write_calibration(file.path, calibrations::make(other, model())).ok());
        const auto method = open_method(std::string(name) + ":calib=" + file.path);
        ASSERT_FALSE(method.ok());
        expect_refusal(method.status(), file.path, {name, "calib", "method is \"" + other + "\", must be"});
        expect_refusal(open_method(std::string(name) + ":calib=/none").status(), "/none", {name, "calib"});
        const auto without = open_method(name);
        ASSERT_FALSE(without.ok());
        expect_refusal(without.status(), name, {"option calib must be given", "calibrate"});
    }
}

TEST(Calibration, MissingAndWrongArraysAreNamed) {
    struct Wrong {
        std::string spec, array;
        int32_t layer, head;
        Side side;
        std::vector<float> values; // empty: the array is missing
        std::string says;
    };
    const std::vector<float> short_one = {1.0f};
    std::vector<float> twice(320), fraction(320), ladder(8, 0.0f);
    std::iota(twice.begin(), twice.end(), 0.0f);
    std::iota(fraction.begin(), fraction.end(), 0.0f);
    twice[5] = 6.0f;
    fraction[5] = 5.5f;
    const std::vector<Wrong> all = {
        {"kvquant", "shift", 0, 1, Side::key, {}, "is missing"},
        {"kvquant", "scale", 2, 3, Side::key, short_one, "has 1 values, must have 80"},
        {"kvquant", "scale", 0, 0, Side::key, std::vector<float>(64, 0.0f), "must be above 0"},
        {"kvquant", "book3", 2, -1, Side::value, {}, "is missing"},
        {"kvquant", "book3", 2, -1, Side::key, ladder, "must ascend"},
        {"kvquant:bits=4", "book4", 0, -1, Side::key, short_one, "has 1 values, must have 16"},
        {"rotatekv", "order", 2, -1, Side::key, {}, "is missing"},
        {"rotatekv", "order", 2, -1, Side::key, short_one, "has 1 values, must have 320"},
        {"rotatekv", "order", 2, -1, Side::key, twice, "no permutation of 0 to 319"},
        {"rotatekv", "order", 2, -1, Side::key, fraction, "no permutation of 0 to 319"},
        {"skvq", "order128", 0, 1, Side::value, {}, "is missing"},
        {"skvq:group=32", "edges32", 0, 1, Side::key, {}, "is missing"},
        {"skvq:group=32", "edges32", 0, 1, Side::key, {0, 64, 64}, "must ascend"},
        {"skvq:group=32", "edges32", 0, 1, Side::key, {0, 32, 60}, "from 0 to 64"},
        {"skvq:group=32", "edges32", 0, 1, Side::key, {0, 8, 16, 64}, "must be 2 to 3 numbers"},
        {"skvq:group=32", "edges32", 0, 1, Side::key, {0, 8.5f, 64}, "whole numbers"},
        {"skvq:across=1", "order128x", 2, -1, Side::key, {}, "is missing"},
        {"kvtuner", "bits", 2, -1, Side::key, {}, "is missing"},
        {"kvtuner", "bits", 2, -1, Side::key, {4, 5}, "1, 2, 3, 4, 6 or 8"},
        {"kvtuner", "bits", 0, -1, Side::key, {2.5f, 4}, "1, 2, 3, 4, 6 or 8"},
        {"kvtuner", "base", -1, -1, Side::key, {}, "is missing"},
        {"kvtuner", "base", -1, -1, Side::key, {1}, "base=token, not of base=kivi"},
    };
    for (const Wrong& w : all) {
        const File file;
        Calibration c = calibrations::make(w.spec.substr(0, w.spec.find(':')), model());
        const auto at = std::find_if(c.arrays.begin(), c.arrays.end(), [&](const CalibrationArray& a) {
            return a.name == w.array && a.layer == w.layer && a.head == w.head && a.side == w.side;
        });
        ASSERT_NE(at, c.arrays.end()) << w.array;
        if (w.values.empty()) {
            c.arrays.erase(at);
        } else {
            at->values = w.values;
        }
        ASSERT_TRUE(write_calibration(file.path, c).ok());
        const auto method =
            open_method(w.spec + (w.spec.find(':') == std::string::npos ? ":" : ",") + "calib=" + file.path);
        ASSERT_FALSE(method.ok()) << w.spec << " " << w.array << " " << w.says;
        expect_refusal(method.status(), file.path,
                       {"array " + w.array, "layer " + std::to_string(w.layer), "head " + std::to_string(w.head),
                        name_of(w.side), w.says});
    }
}

// Text is taken as it stands; a comma ends it.
TEST(Calibration, SpecsKeepThePath) {
    const File file;
    const std::string odd = file.path + " a=b:c";
    ASSERT_TRUE(write_calibration(odd, calibrations::make("skvq", model())).ok());
    const auto method = open_method("skvq:k=3,calib=" + odd + ",clip=0.920");
    ASSERT_TRUE(method.ok()) << method.status().message();
    EXPECT_EQ((*method)->spec(), "skvq:calib=" + odd + ",k=3");
    (void)std::remove(odd.c_str());
    EXPECT_FALSE(open_method("skvq:calib=").ok());
    EXPECT_FALSE(open_method("skvq:calib").ok());
    EXPECT_EQ(name_of(OptionInfo::Kind::text), std::string("text"));
}

} // namespace
} // namespace kvmosaic
