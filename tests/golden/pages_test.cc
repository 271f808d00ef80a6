// Exact bytes of pages. pages.txt comes from an encoder that shares no code with the library (make_pages.py); the
// reader in docs/reader is a second decoder, written from docs/format.md alone. Bug case B3.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>

#include "unit/codec_rules.h"

namespace kvmosaic {
namespace {

using kernels::Table;
using namespace testing;

const std::string kRoot = KVMOSAIC_SOURCE_DIR;

uint32_t crc32(const std::vector<uint8_t>& data) { // as in zlib: reflected 0xEDB88320
    uint32_t crc = 0xFFFFFFFFu;
    for (uint8_t byte : data) {
        crc ^= byte;
        for (int i = 0; i < 8; ++i)
            crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320u : 0u);
    }
    return ~crc;
}

struct Golden {
    std::string line;
    PageLayout page;
    std::string json; // the description that a dump carries
    std::vector<uint16_t> channels;
    uint32_t bytes = 0, crc = 0;
    std::shared_ptr<std::vector<float>> book = std::make_shared<std::vector<float>>();
    std::shared_ptr<std::vector<uint16_t>> edges = std::make_shared<std::vector<uint16_t>>();
};

// [128][dim]; the generator of make_pages.py.
std::vector<float> golden_rows(int32_t dim) {
    Random random(1);
    std::vector<float> rows;
    for (int32_t t = 0; t < kPageTokens; ++t) {
        for (int32_t c = 0; c < dim; ++c) {
            float x = float(int32_t((random.bits() >> 40) % 4096) - 2048) / 256.0f * (c % 7 == 3 ? 8.0f : 1.0f);
            if (t == 9) x = 1.5f;
            if (c == 5 && t >= 32 && t < 64) x = -0.75f;
            rows.push_back(x);
        }
    }
    return rows;
}

GridRule rule_of(const std::string& name) {
    for (int rule = 0; rule <= int(GridRule::fitted); ++rule)
        if (name == name_of(GridRule(rule))) return GridRule(rule);
    ADD_FAILURE() << "no rule " << name;
    return GridRule::asym;
}

template <class T>
std::vector<T> numbers_of(const std::string& list) {
    std::vector<T> all;
    std::istringstream in(list);
    for (std::string one; std::getline(in, one, ',');)
        all.push_back(T(std::stod(one)));
    return all;
}

// What a line says behind the CRC, key=value: into the spec, and as JSON for a dump.
void read_more(std::istream& in, Golden* g, StoreSpec* spec, std::ostream& json) {
    for (std::string word; in >> word;) {
        const std::string key = word.substr(0, word.find('=')), value = word.substr(key.size() + 1);
        if (key == "axis") {
            spec->axis = value == "tokens" ? Axis::tokens : Axis::channels;
            json << R"(, "axis": ")" << value << '"';
        } else if (key == "rule") {
            spec->rule = rule_of(value);
            json << R"(, "rule": ")" << value << '"';
        } else if (key == "levels") {
            spec->levels = uint8_t(std::stoi(value));
            json << R"(, "levels": )" << value;
        } else if (key == "outliers") {
            spec->outliers = uint8_t(std::stoi(value));
            json << R"(, "outliers": )" << value;
        } else if (key == "clip") {
            spec->clip = std::stof(value); // of the encoder: readers need not know
        } else if (key == "shrinks") {
            spec->shrinks = uint8_t(std::stoi(value)); // likewise
        } else if (key == "wide") {
            spec->wide = uint16_t(std::stoi(value));
            json << R"(, "wide": )" << value;
        } else if (key == "map") {
            spec->page_map = value != "0";
            json << R"(, "map": )" << (spec->page_map ? "true" : "false");
        } else if (key == "book") {
            *g->book = numbers_of<float>(value);
            spec->book = g->book->data();
            json << R"(, "book": [)" << value << "]";
        } else if (key == "edges") {
            *g->edges = numbers_of<uint16_t>(value);
            spec->edges = g->edges->data();
            spec->edge_groups = uint8_t(g->edges->size() - 1);
            json << R"(, "edges": [)" << value << "]";
        } else {
            ADD_FAILURE() << "pages.txt: unknown key " << key;
        }
    }
}

std::vector<Golden> golden_pages() {
    std::vector<Golden> all;
    std::ifstream file(kRoot + "/tests/golden/pages.txt");
    for (std::string line; std::getline(file, line);) {
        if (line.empty() || line[0] == '#') continue;
        std::istringstream in(line);
        std::string side_name, store, params_name, widths;
        int32_t dim = 0, group = 0;
        Golden g;
        in >> side_name >> store >> dim >> group >> params_name >> widths >> g.bytes >> std::hex >> g.crc;
        const Side side = side_name == "key" ? Side::key : Side::value;
        ParamType params = ParamType::f16;
        for (ParamType t : {ParamType::bf16, ParamType::f8e4m3})
            if (params_name == name_of(t)) params = t;
        std::ostringstream json;
        json << R"({"kvmosaic_page": 1, "side": ")" << side_name << R"(", "store": ")" << store << R"(", "dim": )"
             << dim << R"(, "group": )" << group << R"(, "params": ")" << params_name << R"(", "bytes": )" << g.bytes;
        StoreSpec spec =
            store == "tiered" ? tiered_spec(group, params) : grid_spec(side, std::stoi(widths), group, params);
        if (store == "codebook") spec.kind = StoreKind::codebook;
        read_more(in, &g, &spec, json);
        Ladder ladder;
        if (store != "tiered") {
            json << R"(, "bits": )" << widths << "}";
        } else {
            int bits = 0, channels = 0;
            char by = 0, comma = ',';
            json << R"(, "ladder": [)";
            for (std::istringstream tiers(widths); comma == ',' && tiers >> bits >> by >> channels; tiers >> comma) {
                json << (ladder.count > 0 ? ", " : "") << "[" << bits << ", " << channels << "]";
                ladder.push(uint8_t(bits), uint16_t(channels));
                comma = ' ';
            }
            json << "]}";
            for (int32_t p = 0; p < dim; ++p)
                g.channels.push_back(uint16_t((p * 37 + 11) % dim));
        }
        EXPECT_TRUE(validate(spec, side, dim)) << line;
        g.page = layout(spec, side, dim, ladder);
        g.json = json.str();
        g.line = line;
        all.push_back(g);
    }
    return all;
}

TEST(Golden, PagesHaveTheirExactBytes) {
    const std::vector<Golden> pages = golden_pages();
    ASSERT_GT(pages.size(), 200u) << "tests/golden/pages.txt was not read";
    for (const Golden& g : pages) {
        ASSERT_EQ(g.page.bytes, g.bytes) << g.line;
        const std::vector<float> rows = golden_rows(g.page.dim);
        for (const Table* table : tables())
            ASSERT_EQ(crc32(encoded(*table, g.page, g.channels, rows).copy()), g.crc) << table->isa << ": " << g.line;
    }
}

TEST(Golden, IndependentReaderDecodesTheSameValues) {
    if (std::system("python3 -c 'import json' > /dev/null 2>&1") != 0) GTEST_SKIP() << "python3 is missing";
    const std::string stem = ::testing::TempDir() + "kvmosaic_golden_" + std::to_string(getpid());
    const std::string dump = stem + ".kvpage", values = stem + ".f32";
    std::vector<float> want;
    {
        std::ofstream out(dump, std::ios::binary);
        const auto add = [&](const std::string& json, const Page& page) {
            out << json << "\n";
            out.write(reinterpret_cast<const char*>(page.bytes()), page.layout().bytes);
            const std::vector<float> rows = restored(kernels::reference(), page);
            want.insert(want.end(), rows.begin(), rows.end());
        };
        for (const Golden& g : golden_pages())
            add(g.json, encoded(kernels::reference(), g.page, g.channels, golden_rows(g.page.dim)));
        for (RawType raw : {RawType::f32, RawType::f16, RawType::bf16}) {
            const PageLayout page = raw_layout(raw, Side::key, 20, 5);
            std::ostringstream json;
            json << R"({"kvmosaic_page": 1, "side": "key", "store": "raw", "dim": 20, "tokens": 5, "raw": ")"
                 << name_of(raw) << R"(", "bytes": )" << page.bytes << "}";
            add(json.str(), encoded(kernels::reference(), page, {}, golden_rows(20)));
        }
        ASSERT_TRUE(out.good());
    }
    const std::string command =
        "python3 '" + kRoot + "/docs/reader/kvpage_reader.py' '" + dump + "' --f32 '" + values + "'";
    ASSERT_EQ(std::system(command.c_str()), 0);
    std::vector<float> got(want.size() + 1);
    std::ifstream in(values, std::ios::binary);
    in.read(reinterpret_cast<char*>(got.data()), std::streamsize(got.size() * sizeof(float)));
    ASSERT_EQ(size_t(in.gcount()), want.size() * sizeof(float));
    for (size_t i = 0; i < want.size(); ++i)
        ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i])) << "value " << i;
    std::remove(dump.c_str());
    std::remove(values.c_str());
}

// A dump that contradicts itself is refused with a message, not decoded.
TEST(Golden, ReaderRefusesWrongSizes) {
    if (std::system("python3 -c 'import json' > /dev/null 2>&1") != 0) GTEST_SKIP() << "python3 is missing";
    const Golden g = golden_pages().front();
    const std::string dump = ::testing::TempDir() + "kvmosaic_short_" + std::to_string(getpid()) + ".kvpage";
    const Page page = encoded(kernels::reference(), g.page, g.channels, golden_rows(g.page.dim));
    const std::string command = "python3 '" + kRoot + "/docs/reader/kvpage_reader.py' '" + dump + "' > /dev/null 2>&1";
    for (int cut : {0, 1}) {
        std::ofstream out(dump, std::ios::binary);
        out << g.json << "\n";
        out.write(reinterpret_cast<const char*>(page.bytes()), std::streamsize(g.bytes) - cut);
        out.close();
        EXPECT_EQ(std::system(command.c_str()) == 0, cut == 0);
    }
    std::remove(dump.c_str());
}

// Bug case B12: a dump cannot declare another order than the version's. What a reader does not know, it refuses.
TEST(Golden, ReaderRefusesWhatItDoesNotKnow) {
    if (std::system("python3 -c 'import json' > /dev/null 2>&1") != 0) GTEST_SKIP() << "python3 is missing";
    const Golden g = golden_pages().front();
    const std::string dump = ::testing::TempDir() + "kvmosaic_unknown_" + std::to_string(getpid()) + ".kvpage";
    const Page page = encoded(kernels::reference(), g.page, g.channels, golden_rows(g.page.dim));
    const std::string command = "python3 '" + kRoot + "/docs/reader/kvpage_reader.py' '" + dump + "' > /dev/null 2>&1";
    const auto accepted = [&](std::string json, const std::string& from, const std::string& to) {
        const size_t at = json.find(from);
        EXPECT_NE(at, std::string::npos) << from;
        std::ofstream out(dump, std::ios::binary);
        out << json.replace(at, from.size(), to) << "\n";
        out.write(reinterpret_cast<const char*>(page.bytes()), g.bytes);
        out.close();
        return std::system(command.c_str()) == 0;
    };
    EXPECT_TRUE(accepted(g.json, R"("bits": )", R"("bits": )"));
    EXPECT_TRUE(accepted(g.json, R"("bits": )", R"("rule": "midpoint", "bits": )"));
    for (const char* more : {R"("nibbles": "high first", )", R"("rule": "symmetrical", )", R"("axis": "depth", )",
                             R"("levels": 5, )", R"("edges": [0, 64, 32, 128], )", R"("rule": "codebook_norm", )"})
        EXPECT_FALSE(accepted(g.json, R"("bits": )", std::string(more) + R"("bits": )")) << more;
    EXPECT_FALSE(accepted(g.json, R"("kvmosaic_page": 1)", R"("kvmosaic_page": 2)"));
    EXPECT_FALSE(accepted(g.json, R"("store": "grid")", R"("store": "stacked")"));
    std::remove(dump.c_str());
}

} // namespace
} // namespace kvmosaic
