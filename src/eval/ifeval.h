// Instructions that a program can check, as IFEval states them (Zhou et al., arXiv 2311.07911): records, and whether an
// answer keeps to each.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

struct Instruction {
    std::string kind; // "keywords:existence"
    nlohmann::json arguments;
};

struct InstructedPrompt {
    int64_t key = 0; // its name in the data
    std::string prompt;
    std::vector<Instruction> instructions;
};
struct InstructedPrompts {
    std::vector<InstructedPrompt> items; // all of whose instructions can be checked
    int64_t left_out = 0;                // others
    std::string sha256;                  // of the file
};
// JSON lines with `key`, `prompt`, `instruction_id_list`, `kwargs`.
Result<InstructedPrompts> read_ifeval(const std::string& path);

const std::vector<std::string>& checkable_kinds();
// Kinds that are known and cannot be checked here: sentences and languages need a library that knows them.
const std::vector<std::string>& unchecked_kinds();

// ok, or the argument that the kind needs and does not find.
Status validate(const Instruction& instruction);
// Of a valid instruction. An empty answer keeps to none.
bool kept(const Instruction& instruction, const std::string& answer);

} // namespace kvmosaic::eval
