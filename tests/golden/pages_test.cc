// Exact bytes of pages. pages.txt comes from an encoder that shares no code with the library (make_pages.py); the
// reader in docs/reader is a second decoder, written from docs/format.md alone. Bug case B3.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "unit/codec_util.h"

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
        if (store == "grid") {
            g.page = layout(grid_spec(side, std::stoi(widths), group, params), side, dim);
            json << R"(, "bits": )" << widths << "}";
        } else {
            Ladder ladder;
            int bits = 0, channels = 0;
            char by = 0, comma = ',';
            json << R"(, "ladder": [)";
            for (std::istringstream tiers(widths); comma == ',' && tiers >> bits >> by >> channels; tiers >> comma) {
                json << (ladder.count > 0 ? ", " : "") << "[" << bits << ", " << channels << "]";
                ladder.push(uint8_t(bits), uint16_t(channels));
                comma = ' ';
            }
            json << "]}";
            g.page = layout(tiered_spec(group, params), side, dim, ladder);
            for (int32_t p = 0; p < dim; ++p)
                g.channels.push_back(uint16_t((p * 37 + 11) % dim));
        }
        g.json = json.str();
        g.line = line;
        all.push_back(g);
    }
    return all;
}

TEST(Golden, PagesHaveTheirExactBytes) {
    const std::vector<Golden> pages = golden_pages();
    ASSERT_GT(pages.size(), 70u) << "tests/golden/pages.txt was not read";
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

} // namespace
} // namespace kvmosaic
