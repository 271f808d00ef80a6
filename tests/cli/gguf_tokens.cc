// Token ids of texts through the program's own front door. Reads one hex-encoded text a line; answers with a line of
// ids, then a line with the hex of the ids' joined pieces. Usage: gguf_tokens MODEL < texts
#include <cstdio>
#include <iostream>
#include <string>

#include "eval/engine.h"

int main(int argc, char** argv) {
    if (argc != 2) return 2;
    kvmosaic::eval::set_verbose(false);
    auto model = kvmosaic::eval::Model::load(argv[1]);
    if (!model.ok()) {
        std::fprintf(stderr, "%s\n", model.status().message().c_str());
        return 1;
    }
    std::string line;
    while (std::getline(std::cin, line)) {
        std::string text, joined;
        for (size_t i = 0; i + 1 < line.size(); i += 2) {
            text += static_cast<char>(std::stoi(line.substr(i, 2), nullptr, 16));
        }
        for (const int32_t id : model->tokenize(text, false, false)) {
            std::printf("%d ", id);
            joined += model->piece(id);
        }
        std::printf("\n");
        for (const unsigned char c : joined) {
            std::printf("%02x", static_cast<unsigned>(c));
        }
        std::printf("\n");
    }
    return 0;
}
