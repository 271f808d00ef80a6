// The one-way rule of DESIGN.md, read from the #include lines of the tree:
//   core <- store <- transform <- methods, store <- kernels,
//   {methods, kernels, transform} <- cache <- file <- {capi, llama <- eval <- tools}
#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "kvmosaic/method.h"

namespace kvmosaic {
namespace {

namespace fs = std::filesystem;
using Set = std::set<std::string>;

const fs::path kRoot = KVMOSAIC_SOURCE_DIR;

// What each area may include.
const std::map<std::string, Set> kMayInclude = [] {
    std::map<std::string, Set> may;
    may["core"] = {"core"};
    may["store"] = {"core", "store"};
    may["transform"] = {"core", "store", "transform"};
    may["methods"] = {"core", "store", "transform", "methods"};
    may["kernels"] = {"core", "store", "kernels"};
    may["cache"] = {"core", "store", "transform", "methods", "kernels", "cache"};
    may["file"] = {"core", "cache", "file"}; // and libraries and public headers, as all below
    may["capi"] = {"core", "cache", "file", "capi"};
    may["llama"] = {"core", "cache", "file", "llama"};
    may["eval"] = {"core", "cache", "file", "llama", "eval"};
    may["tools"] = {"core", "kernels", "cache", "file", "llama", "eval", "tools"};
    return may;
}();

// The area that a public header belongs to.
const std::map<std::string, std::string> kPublic = {
    {"status.h", "core"},         {"numeric.h", "core"},        {"shape.h", "core"},     {"options.h", "core"},
    {"store.h", "store"},         {"transform.h", "transform"}, {"method.h", "methods"}, {"cache.h", "cache"},
    {"calibration.h", "methods"}, {"device.h", "kernels"},      {"file.h", "file"},      {"device_cache.h", "cache"},
};

const Set kCoreLibrary = {"core", "store", "transform", "methods", "kernels", "cache"};

struct Include {
    std::string name;
    bool angle = false;
};

std::vector<Include> includes_of(const std::string& text) {
    std::vector<Include> found;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        char sharp = 0;
        std::string rest;
        if (!(words >> sharp) || sharp != '#' || !std::getline(words >> std::ws, rest)) continue;
        if (rest.rfind("include", 0) != 0) continue;
        const size_t open = rest.find_first_of("<\"");
        const size_t close = open == std::string::npos ? open : rest.find_first_of(">\"", open + 1);
        if (close != std::string::npos) found.push_back({rest.substr(open + 1, close - open - 1), rest[open] == '<'});
    }
    return found;
}

// Headers of the C++ library have no ending; the few others that core code may use are instruction sets and the system.
bool standard(const std::string& name) {
    static const Set others = {"immintrin.h", "arm_neon.h", "cpuid.h", "unistd.h", "sys/mman.h", "sys/auxv.h"};
    return name.find('.') == std::string::npos || others.count(name) > 0;
}

// The area of an include, "" for those of the C++ library, "?" for what is not ours.
std::string area_of(const Include& include, const std::string& own_area) {
    if (include.angle && standard(include.name)) return "";
    const size_t slash = include.name.find('/');
    if (slash == std::string::npos) return include.angle ? "?" : own_area; // a file beside this one
    const std::string folder = include.name.substr(0, slash);
    if (folder == "kvmosaic") {
        const auto header = kPublic.find(include.name.substr(slash + 1));
        return header == kPublic.end() ? "?" : header->second;
    }
    return kMayInclude.count(folder) ? folder : "?";
}

// One sentence for each include that breaks the rule.
std::vector<std::string> violations(const std::string& file, const std::string& area, const std::string& text) {
    std::vector<std::string> found;
    const bool device = file.rfind("src/kernels/cuda/", 0) == 0;
    for (const Include& include : includes_of(text)) {
        if (device && include.angle && include.name.rfind("cuda", 0) == 0) continue; // the toolkit's own headers
        const std::string other = area_of(include, area);
        const bool foreign = other == "?";
        if (foreign && !kCoreLibrary.count(area)) continue; // adapters and programs use libraries
        const bool public_header = include.name.rfind("kvmosaic/", 0) == 0 && !kCoreLibrary.count(area);
        if (foreign || (!other.empty() && !public_header && !kMayInclude.at(area).count(other))) {
            found.push_back(file + " (" + area + ") may not include " + include.name);
        }
    }
    return found;
}

std::string read(const fs::path& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
}

std::vector<fs::path> sources_under(const fs::path& folder) {
    std::vector<fs::path> files;
    if (!fs::exists(folder)) return files;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
        const std::string ending = entry.path().extension().string();
        if (Set{".cc", ".h", ".def", ".inc", ".cu", ".cuh"}.count(ending)) files.push_back(entry.path());
    }
    return files;
}

TEST(IncludeRule, SourcesLookDownOnly) {
    int files = 0;
    for (const auto& [area, may] : kMayInclude) {
        for (const fs::path& path : sources_under(area == "tools" ? kRoot / "tools" : kRoot / "src" / area)) {
            ++files;
            for (const std::string& v : violations(fs::relative(path, kRoot).string(), area, read(path))) {
                ADD_FAILURE() << v;
            }
        }
    }
    EXPECT_GT(files, 15);
}

TEST(IncludeRule, EveryFolderHasAPlace) {
    for (const auto& entry : fs::directory_iterator(kRoot / "src")) {
        if (entry.is_directory()) {
            EXPECT_TRUE(kMayInclude.count(entry.path().filename().string())) << entry.path();
        }
    }
}

TEST(IncludeRule, PublicHeadersLookDownOnlyAndNameNoLibrary) {
    int headers = 0;
    for (const fs::path& path : sources_under(kRoot / "include" / "kvmosaic")) {
        const auto area = kPublic.find(path.filename().string());
        ASSERT_NE(area, kPublic.end()) << path.filename() << " is not in the table of this test";
        const std::string text = read(path);
        for (const std::string& v : violations(path.filename().string(), area->second, text))
            ADD_FAILURE() << v;
        EXPECT_EQ(text.find("ggml"), std::string::npos) << path;
        EXPECT_EQ(text.find("llama.h"), std::string::npos) << path;
        ++headers;
    }
    EXPECT_GE(headers, 8);
    EXPECT_LE(headers, 12);
}

// Whether `word` occurs in the text as a word of its own, or as the beginning of one; letter case is ignored.
bool mentions(std::string text, const std::string& word, bool as_prefix = false) {
    const auto alphanumeric = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
    for (char& c : text)
        c = char(std::tolower(static_cast<unsigned char>(c)));
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
        const size_t end = at + word.size();
        const bool begins = at == 0 || !alphanumeric(text[at - 1]);
        const bool ends = as_prefix || end == text.size() || !alphanumeric(text[end]);
        if (begins && ends) return true;
    }
    return false;
}

TEST(IncludeRule, CoreLibraryKnowsNoModelLibrary) {
    for (const std::string& area : kCoreLibrary) {
        for (const fs::path& path : sources_under(kRoot / "src" / area)) {
            const std::string text = read(path);
            for (const char* library : {"llama", "ggml", "gguf"}) {
                for (const Include& include : includes_of(text)) {
                    EXPECT_EQ(include.name.find(library), std::string::npos) << path << " includes " << include.name;
                }
                EXPECT_FALSE(mentions(text, std::string(library) + "_", true)) << path << " uses " << library;
            }
        }
    }
}

// The adapter must work for methods that do not exist yet. (The names of raw stores are also type names and do occur.)
TEST(IncludeRule, NoMethodNameInTheAdapter) {
    const Set raw = {name_of(RawType::f16), name_of(RawType::bf16), name_of(RawType::f32)};
    for (const fs::path& path : sources_under(kRoot / "src" / "llama")) {
        const std::string text = read(path);
        for (const MethodInfo* info : methods()) {
            if (raw.count(info->name)) continue;
            EXPECT_FALSE(mentions(text, info->name)) << path << " names " << info->name;
        }
    }
}

TEST(IncludeRule, NoMethodNameInKernelsCacheAndStores) {
    for (const char* area : {"core", "store", "kernels", "cache"}) {
        for (const fs::path& path : sources_under(kRoot / "src" / area)) {
            for (const Include& include : includes_of(read(path))) {
                EXPECT_EQ(include.name.find("methods/"), std::string::npos) << path; // only through kvmosaic/method.h
            }
        }
    }
}

TEST(IncludeRule, TheseChecksCanFail) {
    const auto count = [](const char* area, const char* text) { return violations("x.cc", area, text).size(); };
    EXPECT_EQ(count("core", "#include <vector>\n#include \"kvmosaic/shape.h\"\n#include \"core/text.h\"\n"), 0u);
    EXPECT_EQ(count("core", "#include \"kvmosaic/store.h\"\n"), 1u);
    EXPECT_EQ(count("core", "  #  include <fmt/core.h>\n"), 1u);
    EXPECT_EQ(count("store", "#include \"kvmosaic/method.h\"\n#include \"methods/method.h\"\n"), 2u);
    EXPECT_EQ(count("methods", "#include \"kernels/kernels.h\"\n#include \"cache/impl.h\"\n"), 2u);
    EXPECT_EQ(count("kernels", "#include <immintrin.h>\n#include \"kvmosaic/method.h\"\n"), 1u);
    EXPECT_EQ(count("kernels", "#include <cuda_fp16.h>\n"), 1u);
    EXPECT_EQ(
        violations("src/kernels/cuda/x.cuh", "kernels", "#include <cuda_fp16.h>\n#include <cub/cub.cuh>\n").size(), 1u);
    EXPECT_EQ(count("cache", "#include \"llama/seam.h\"\n#include \"llama.h\"\n#include <ggml.h>\n"), 2u);
    EXPECT_EQ(count("llama", "#include \"llama.h\"\n#include \"eval/engine.h\"\n#include \"kernels/kernels.h\"\n"), 2u);
    EXPECT_EQ(count("llama", "#include \"kvmosaic/method.h\"\n#include \"methods/method.h\"\n"), 1u);
    EXPECT_TRUE(mentions("return \"KIVI\";", "kivi"));
    EXPECT_TRUE(mentions("open(kivi_spec)", "kivi"));
    EXPECT_FALSE(mentions("akivi kivia", "kivi"));
}

} // namespace
} // namespace kvmosaic
