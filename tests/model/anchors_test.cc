// cmake/apply_seam.cmake: finds its anchors in the llama.cpp that is built, inserts lines and nothing else, and names
// an anchor that has moved.
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

namespace kvmosaic::testing {
namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
}

void write(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::vector<std::string> lines(const std::string& text) {
    std::vector<std::string> out;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);)
        out.push_back(line);
    return out;
}

bool inserted(const std::string& line) {
    return line.size() >= 11 && line.compare(line.size() - 11, 11, "// kvmosaic") == 0;
}

std::string without_insertions(const std::string& text) {
    std::string out;
    for (const std::string& line : lines(text)) {
        if (!inserted(line)) out += line + "\n";
    }
    return out;
}

// The smallest tree in which every anchor occurs once.
const std::string kModel = "#include \"llama-model.h\"\n"
                           "int window() {\n    GGML_ASSERT(hparams.is_swa_any());\n    return 1;\n}\n"
                           "int plain() {\n    GGML_ASSERT(!hparams.is_swa_any());\n    return 2;\n}\n";

std::string graph_text() {
    std::string text = "#include \"llama-graph.h\"\n";
    for (const char* name : {"build_attn_inp_kv", "build_attn_inp_kv_iswa", "build_inp_pos_bucket_dec",
                             "build_attn_inp_k", "build_attn_inp_k_iswa"}) {
        text += std::string("T * llm_graph_context::") + name + "() const {\n    return nullptr;\n}\n";
    }
    for (const char* kind : {"kv", "kv_iswa"}) {
        text += std::string("ggml_tensor * llm_graph_context::build_attn(\n        llm_graph_input_attn_") + kind +
                " * inp,\n        int il) const {\n    return nullptr;\n}\n";
    }
    return text;
}

class Anchors : public ::testing::Test {
protected:
    void SetUp() override {
        tree = fs::temp_directory_path() / ("kvmosaic-anchors-" + std::to_string(getpid()));
        fs::remove_all(tree);
        fs::create_directories(tree / "src");
        write(tree / "src/llama-model.cpp", kModel);
        write(tree / "src/llama-graph.cpp", graph_text());
    }
    void TearDown() override { fs::remove_all(tree); }

    struct Outcome {
        int code = 0;
        std::string output;
    };
    Outcome apply(bool check_only = false) const {
        const std::string command = std::string("\"") + KVMOSAIC_CMAKE + "\" -DLLAMA_DIR=\"" + tree.string() + "\"" +
                                    (check_only ? " -DCHECK_ONLY=ON" : "") +
                                    " -P \"" KVMOSAIC_SOURCE_DIR "/cmake/apply_seam.cmake\" 2>&1";
        Outcome outcome;
        FILE* pipe = popen(command.c_str(), "r");
        if (!pipe) return {-1, "cannot start cmake"};
        std::array<char, 4096> buffer;
        while (const size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe))
            outcome.output.append(buffer.data(), n);
        outcome.code = pclose(pipe);
        return outcome;
    }
    fs::path model() const { return tree / "src/llama-model.cpp"; }
    fs::path graph() const { return tree / "src/llama-graph.cpp"; }

    fs::path tree;
};

TEST_F(Anchors, OccurInTheLlamaCppThatIsBuilt) {
    const fs::path built = fs::path(KVMOSAIC_LLAMA_DIR) / "src/src";
    ASSERT_TRUE(fs::exists(built / "llama-graph.cpp")) << built;
    for (const char* name : {"llama-model.cpp", "llama-graph.cpp"}) {
        write(tree / "src" / name, without_insertions(read(built / name)));
    }
    const Outcome check = apply(true);
    EXPECT_EQ(check.code, 0) << check.output;
    EXPECT_NE(check.output.find("all anchors found"), std::string::npos) << check.output;
    ASSERT_EQ(apply().code, 0);
    EXPECT_EQ(read(model()), read(built / "llama-model.cpp"));
    EXPECT_EQ(read(graph()), read(built / "llama-graph.cpp"));
}

TEST_F(Anchors, ElevenLinesAreInsertedAndNothingElseChanges) {
    ASSERT_EQ(apply(true).code, 0);
    EXPECT_EQ(read(graph()), graph_text()); // a check writes nothing
    const Outcome first = apply();
    ASSERT_EQ(first.code, 0) << first.output;
    int count = 0;
    for (const fs::path& path : {model(), graph()}) {
        for (const std::string& line : lines(read(path)))
            count += inserted(line);
    }
    EXPECT_EQ(count, 11);
    EXPECT_EQ(without_insertions(read(model())), kModel);
    EXPECT_EQ(without_insertions(read(graph())), graph_text());
    EXPECT_EQ(read(tree / "src/kvmosaic_seam.h"), read(fs::path(KVMOSAIC_SOURCE_DIR) / "src/llama/seam.h"));

    const std::string patched = read(graph());
    const Outcome second = apply();
    EXPECT_EQ(second.code, 0);
    EXPECT_NE(second.output.find("already applied"), std::string::npos) << second.output;
    EXPECT_EQ(read(graph()), patched);
}

TEST_F(Anchors, MovedAnchorIsNamedAndNothingIsWritten) {
    const std::string anchor = "llm_graph_context::build_attn_inp_kv_iswa()";
    std::string text = graph_text();
    text.replace(text.find(anchor), anchor.size(), "llm_graph_context::build_window_input()");
    write(graph(), text);
    for (const bool check_only : {true, false}) {
        const Outcome outcome = apply(check_only);
        EXPECT_NE(outcome.code, 0);
        EXPECT_NE(outcome.output.find("llama-graph.cpp"), std::string::npos) << outcome.output;
        EXPECT_NE(outcome.output.find(anchor), std::string::npos) << outcome.output;
        EXPECT_NE(outcome.output.find("0 times"), std::string::npos) << outcome.output;
    }
    EXPECT_EQ(read(graph()), text);
    EXPECT_EQ(read(model()), kModel);
}

TEST_F(Anchors, AmbiguousAnchorIsNamed) {
    write(model(), kModel + "int again() {\n    GGML_ASSERT(!hparams.is_swa_any());\n}\n");
    const Outcome outcome = apply();
    EXPECT_NE(outcome.code, 0);
    EXPECT_NE(outcome.output.find("llama-model.cpp"), std::string::npos) << outcome.output;
    EXPECT_NE(outcome.output.find("2 times"), std::string::npos) << outcome.output;
}

TEST_F(Anchors, HalfPatchedTreeIsRefused) {
    ASSERT_EQ(apply().code, 0);
    write(model(), kModel);
    const Outcome outcome = apply();
    EXPECT_NE(outcome.code, 0);
    EXPECT_NE(outcome.output.find("half patched"), std::string::npos) << outcome.output;
}

} // namespace
} // namespace kvmosaic::testing
