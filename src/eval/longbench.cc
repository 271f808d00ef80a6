#include "eval/longbench.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include <fmt/format.h>

#include "eval/records.h"

namespace kvmosaic::eval {

namespace {

std::vector<std::string> words_of(const std::string& text) {
    std::vector<std::string> out;
    std::string word;
    for (const char c : text + " ") {
        if (!std::isspace(static_cast<unsigned char>(c))) {
            word += c;
        } else if (!word.empty()) {
            out.push_back(std::exchange(word, ""));
        }
    }
    return out;
}

// Words as the QA metric compares them.
std::vector<std::string> plain_words(const std::string& text) {
    std::string plain;
    for (const char c : text) {
        const auto u = static_cast<unsigned char>(c);
        if (!std::ispunct(u)) plain += char(std::tolower(u));
    }
    std::vector<std::string> out = words_of(plain);
    std::erase_if(out, [](const std::string& w) { return w == "a" || w == "an" || w == "the"; });
    return out;
}

// The sentences' words, none of them empty.
std::vector<std::vector<std::string>> sentences_of(const std::string& text) {
    std::vector<std::vector<std::string>> out;
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find('.', at), text.size());
        std::vector<std::string> words = words_of(text.substr(at, end - at));
        if (!words.empty()) out.push_back(std::move(words));
        at = end + 1;
    }
    return out;
}

// Adds the words of a longest common subsequence. Of several it is the one that a walk from the ends finds that steps
// back in `a` only where that is better.
void add_common(const std::vector<std::string>& a, const std::vector<std::string>& b, std::set<std::string>* words) {
    std::vector<std::vector<int32_t>> longest(a.size() + 1, std::vector<int32_t>(b.size() + 1, 0));
    for (size_t i = 1; i <= a.size(); ++i) {
        for (size_t j = 1; j <= b.size(); ++j) {
            longest[i][j] =
                a[i - 1] == b[j - 1] ? longest[i - 1][j - 1] + 1 : std::max(longest[i - 1][j], longest[i][j - 1]);
        }
    }
    for (size_t i = a.size(), j = b.size(); i > 0 && j > 0;) {
        if (a[i - 1] == b[j - 1]) {
            words->insert(a[i - 1]);
            --i, --j;
        } else if (longest[i - 1][j] > longest[i][j - 1]) {
            --i;
        } else {
            --j;
        }
    }
}

std::vector<std::string> numbers_of(const std::string& text) {
    std::vector<std::string> out;
    std::string number;
    for (const char c : text + " ") {
        if (c >= '0' && c <= '9') {
            number += c;
        } else if (!number.empty()) {
            out.push_back(std::exchange(number, ""));
        }
    }
    return out;
}

} // namespace

const char* name_of(LongMetric metric) {
    switch (metric) {
    case LongMetric::f1:
        return "F1";
    case LongMetric::rouge_l:
        return "ROUGE-L";
    case LongMetric::retrieval:
        return "retrieval";
    default:
        return "count";
    }
}

const std::vector<LongTask>& long_tasks() {
    static const std::vector<LongTask> tasks{{"narrativeqa", LongMetric::f1, 128},
                                             {"qasper", LongMetric::f1, 128},
                                             {"multifieldqa_en", LongMetric::f1, 64},
                                             {"hotpotqa", LongMetric::f1, 32},
                                             {"2wikimqa", LongMetric::f1, 32},
                                             {"musique", LongMetric::f1, 32},
                                             {"gov_report", LongMetric::rouge_l, 512},
                                             {"qmsum", LongMetric::rouge_l, 512},
                                             {"multi_news", LongMetric::rouge_l, 512},
                                             {"passage_count", LongMetric::count, 32},
                                             {"passage_retrieval_en", LongMetric::retrieval, 32}};
    return tasks;
}

const LongTask* find_long_task(const std::string& name) {
    for (const LongTask& task : long_tasks())
        if (task.name == name) return &task;
    return nullptr;
}

Result<LongItems> read_longbench(const std::string& path) {
    const Result<Records> records = read_records(path, {"task", "prompt"});
    if (!records) return records.status();
    LongItems out;
    out.sha256 = records->sha256;
    for (size_t i = 0; i < records->items.size(); ++i) {
        const nlohmann::json& record = records->items[i];
        const auto wrong = [&](const std::string& why) {
            return Status(StatusCode::invalid_argument, fmt::format("{}, line {}: {}", path, records->lines[i], why));
        };
        LongItem item;
        item.task = find_long_task(record["task"]);
        if (!item.task) {
            std::vector<std::string> names;
            for (const LongTask& task : long_tasks())
                names.push_back(task.name);
            return wrong(
                fmt::format("task '{}' is none of {}", record["task"].get<std::string>(), fmt::join(names, ", ")));
        }
        item.prompt = record["prompt"];
        const auto answers = record.find("answers");
        if (answers == record.end() || !answers->is_array() || answers->empty()) {
            return wrong("has no list of texts in the field 'answers'");
        }
        for (const nlohmann::json& answer : *answers) {
            if (!answer.is_string()) return wrong("has no list of texts in the field 'answers'");
            item.answers.push_back(answer);
        }
        out.items.push_back(std::move(item));
    }
    return out;
}

double score(const LongItem& item, const std::string& said) {
    double best = 0;
    for (const std::string& wanted : item.answers) {
        switch (item.task->metric) {
        case LongMetric::f1:
            best = std::max(best, token_f1(said, wanted));
            break;
        case LongMetric::rouge_l:
            best = std::max(best, rouge_l(said, wanted));
            break;
        default:
            best = std::max(best, right_numbers(said, wanted));
        }
    }
    return best;
}

double token_f1(const std::string& said, const std::string& wanted) {
    const std::vector<std::string> mine = plain_words(said), theirs = plain_words(wanted);
    std::map<std::string, int> left;
    for (const std::string& w : theirs)
        ++left[w];
    double same = 0;
    for (const std::string& w : mine) {
        if (left[w] <= 0) continue;
        --left[w];
        ++same;
    }
    if (same == 0) return 0;
    const double precision = same / double(mine.size()), recall = same / double(theirs.size());
    return 2 * precision * recall / (precision + recall);
}

double rouge_l(const std::string& said, const std::string& wanted) {
    const auto mine = sentences_of(said), theirs = sentences_of(wanted);
    std::set<std::string> common, said_words, wanted_words;
    for (const auto& sentence : mine)
        said_words.insert(sentence.begin(), sentence.end());
    for (const auto& sentence : theirs) {
        wanted_words.insert(sentence.begin(), sentence.end());
        for (const auto& other : mine)
            add_common(sentence, other, &common);
    }
    if (common.empty()) return 0;
    const double precision = double(common.size()) / double(said_words.size());
    const double recall = double(common.size()) / double(wanted_words.size());
    return 2 * precision * recall / (precision + recall + 1e-8);
}

double right_numbers(const std::string& said, const std::string& wanted) {
    const std::vector<std::string> mine = numbers_of(said), theirs = numbers_of(wanted);
    if (mine.empty() || theirs.empty()) return 0;
    return double(std::count(mine.begin(), mine.end(), theirs.front())) / double(mine.size());
}

std::vector<int32_t> without_middle(const std::vector<int32_t>& tokens, size_t most) {
    if (tokens.size() <= most) return tokens;
    const int64_t tail = int64_t(most / 2), head = int64_t(most) - tail;
    std::vector<int32_t> out(tokens.begin(), tokens.begin() + head);
    out.insert(out.end(), tokens.end() - tail, tokens.end());
    return out;
}

} // namespace kvmosaic::eval
