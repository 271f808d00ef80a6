#include "eval/gsm8k.h"

#include <algorithm>

#include <fmt/format.h>

#include "eval/records.h"

namespace kvmosaic::eval {

namespace {

constexpr const char* kMark = "####";

bool digit(const std::string& text, size_t i) { return i < text.size() && text[i] >= '0' && text[i] <= '9'; }

// The number whose first digit (or point before a digit) stands at `at`; `at` goes behind it.
std::string number_at(const std::string& text, size_t* at) {
    const auto before = [&](size_t back) { return *at >= back ? text[*at - back] : ' '; };
    size_t back = 1;
    if (before(back) == '$') ++back;
    const char left = before(back + 1);
    const bool joined = (left >= '0' && left <= '9') || (left >= 'a' && left <= 'z') || (left >= 'A' && left <= 'Z') ||
                        left == ')' || left == '-';
    const bool minus = *at >= back && before(back) == '-' && !joined; // "10-5" ends with 5, "= -5" with -5
    std::string whole, part;
    size_t i = *at;
    while (digit(text, i)) {
        whole += text[i++];
        const bool group = i < text.size() && text[i] == ',' && digit(text, i + 1) && digit(text, i + 2) &&
                           digit(text, i + 3) && !digit(text, i + 4);
        if (group) ++i;
    }
    if (i < text.size() && text[i] == '.' && digit(text, i + 1)) {
        while (digit(text, ++i))
            part += text[i];
    }
    *at = i;
    whole.erase(0, std::min(whole.find_first_not_of('0'), whole.size()));
    part.erase(part.find_last_not_of('0') + 1);
    if (whole.empty()) whole.push_back('0');
    const std::string size = part.empty() ? whole : whole + "." + part;
    return minus && size != "0" ? "-" + size : size;
}

// The first or the last number from `from` on.
std::string find_number(const std::string& text, size_t from, bool last) {
    std::string out;
    for (size_t i = from; i < text.size();) {
        const bool begins = digit(text, i) || (text[i] == '.' && digit(text, i + 1) && !digit(text, i - 1));
        if (!begins) {
            ++i;
            continue;
        }
        out = number_at(text, &i);
        if (!last) break;
    }
    return out;
}

std::string trimmed(std::string text) {
    text.erase(text.find_last_not_of(" \t\r\n") + 1);
    text.erase(0, std::min(text.find_first_not_of(" \t\r\n"), text.size()));
    return text;
}

} // namespace

std::string marked_number(const std::string& text) {
    const size_t mark = text.find(kMark);
    if (mark == std::string::npos) return "";
    const size_t end = std::min(text.find('\n', mark), text.size());
    return find_number(text.substr(0, end), mark + 4, false);
}

std::string last_number(const std::string& text) { return find_number(text, 0, true); }

Result<MathProblems> read_math(const std::string& path) {
    const Result<Records> records = read_records(path, {"question", "answer"});
    if (!records) return records.status();
    MathProblems out;
    out.sha256 = records->sha256;
    for (size_t i = 0; i < records->items.size(); ++i) {
        const nlohmann::json& record = records->items[i];
        std::string answer = record["answer"];
        MathProblem problem;
        problem.question = trimmed(record["question"]);
        problem.number = marked_number(answer);
        if (problem.number.empty()) {
            return Status(
                StatusCode::invalid_argument,
                fmt::format("{}, line {}: its answer has no number behind \"{}\"", path, records->lines[i], kMark));
        }
        for (size_t at = 0; (at = answer.find("<<", at)) != std::string::npos;) {
            const size_t end = answer.find(">>", at);
            if (end == std::string::npos) break;
            answer.erase(at, end + 2 - at);
        }
        problem.solution = trimmed(answer.substr(0, answer.find(kMark)));
        out.items.push_back(std::move(problem));
    }
    return out;
}

std::string ask(const MathProblem& problem) { return fmt::format("Question: {}\nAnswer:", problem.question); }
std::string solve(const MathProblem& problem) {
    return fmt::format(" {}\n{} {}\n\n", problem.solution, kMark, problem.number);
}

std::string few_shot(const std::vector<MathProblem>& solved, const MathProblem& problem) {
    std::string out;
    for (const MathProblem& one : solved)
        out += ask(one) + solve(one);
    return out + ask(problem);
}

} // namespace kvmosaic::eval
