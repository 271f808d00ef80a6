// Word problems whose answer is a number: records, prompts, and the number that a text ends with.
#pragma once

#include <string>
#include <vector>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

struct MathProblem {
    std::string question, solution; // in words, without the notes of a calculator in <<...>> and the marked number
    std::string number;             // the answer, as numbers are written here
};
struct MathProblems {
    std::vector<MathProblem> items;
    std::string sha256; // of the file
};
// JSON lines with `question` and `answer`, the answer's number behind "####".
Result<MathProblems> read_math(const std::string& path);

// A problem as text, and what is to follow it. Solved ones end with an empty line.
std::string ask(const MathProblem& problem);
std::string solve(const MathProblem& problem);
// Solved ones, then one that is not: what a model is to continue, until it asks the next question itself.
std::string few_shot(const std::vector<MathProblem>& solved, const MathProblem& problem);
inline constexpr const char* kNextQuestion = "\nQuestion:";

// A number as it is compared: no "$", no thousands' commas, no "+", no zeros that say nothing; "" for no number.
// marked: the one behind the first "####"; last: the last one of the text, whatever stands around it.
std::string marked_number(const std::string& text);
std::string last_number(const std::string& text);

} // namespace kvmosaic::eval
