// LongBench (Bai et al., arXiv 2308.14508): prompts with their reference answers, and the metrics of its English tasks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

enum class LongMetric : uint8_t { f1, rouge_l, retrieval, count };
const char* name_of(LongMetric metric);

struct LongTask {
    std::string name;
    LongMetric metric;
    int32_t max_tokens; // of an answer, as the benchmark has it
};
const std::vector<LongTask>& long_tasks();
const LongTask* find_long_task(const std::string& name);

struct LongItem {
    const LongTask* task = nullptr;
    std::string prompt;
    std::vector<std::string> answers; // each as good as the others
};
struct LongItems {
    std::vector<LongItem> items;
    std::string sha256; // of the file
};
// JSON lines with `task`, `prompt`, `answers`.
Result<LongItems> read_longbench(const std::string& path);

// 0 to 1, the best over the answers.
double score(const LongItem& item, const std::string& said);

// Words in common by words said and words wanted, after lower case, without punctuation and articles.
double token_f1(const std::string& said, const std::string& wanted);
// F of the longest common subsequences of sentences over words, as the Python package `rouge` 1.0 computes it for whole
// summaries (different words count once).
double rouge_l(const std::string& said, const std::string& wanted);
// Share of the numbers said that are the wanted one ("Paragraph 7": 7).
double right_numbers(const std::string& said, const std::string& wanted);

// Too long a prompt loses its middle: the first and the last half of `most` tokens stay.
std::vector<int32_t> without_middle(const std::vector<int32_t>& tokens, size_t most);

} // namespace kvmosaic::eval
