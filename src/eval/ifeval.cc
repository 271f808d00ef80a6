#include "eval/ifeval.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>

#include <fmt/format.h>

#include "eval/ifeval_text.h"
#include "eval/records.h"

namespace kvmosaic::eval {

namespace {

using nlohmann::json;
using text::lower;
using text::strip;

struct Kind {
    std::vector<const char*> texts, numbers, lists; // arguments that it needs
    std::function<bool(const json& arguments, const std::string& answer)> kept;
};

bool holds(const json& a, const char* relation, const char* bound, int64_t n) {
    const int64_t limit = a.at(bound);
    return a.at(relation) == "less than" ? n < limit : n >= limit;
}

bool not_blank(const std::string& s) { return !strip(s).empty(); }

// Paragraphs between separators: empty ones at the two ends do not count, others make the text malformed.
bool paragraphs(const std::string& answer, const std::string& separator, std::vector<std::string>* out) {
    const std::vector<std::string> parts = text::split(answer, separator);
    for (size_t i = 0; i < parts.size(); ++i) {
        if (not_blank(parts[i]))
            out->push_back(strip(parts[i]));
        else if (i != 0 && i + 1 != parts.size())
            return false;
    }
    return true;
}

bool nth_first_word(const json& a, const std::string& answer) {
    std::vector<std::string> parts = text::split(answer, "\n\n");
    const int64_t n = a.at("nth_paragraph");
    if (n < 1 || n > int64_t(parts.size())) return false;
    const std::string paragraph = strip(parts[size_t(n - 1)]);
    if (std::count_if(parts.begin(), parts.end(), not_blank) != a.at("num_paragraphs").get<int64_t>()) return false;
    std::string word = paragraph.substr(0, paragraph.find_first_of(" \t\r\n"));
    word.erase(0, std::min(word.find_first_not_of("'\""), word.size()));
    return lower(word.substr(0, word.find_first_of(".,?!'\""))) == lower(a.at("first_word"));
}

int64_t bullets(const std::string& answer) {
    int64_t n = 0;
    for (const std::string& line : text::split(answer, "\n")) {
        const std::string s = strip(line);
        n += s.starts_with('-') || (s.size() > 1 && s[0] == '*' && s[1] != '*');
    }
    return n;
}

int64_t highlights(const std::string& answer) {
    int64_t n = 0;
    for (const std::string& mark : {std::string("*"), std::string("**")}) {
        for (const std::string& part : text::enclosed(answer, mark, mark, '*'))
            n += not_blank(part);
    }
    return n;
}

int64_t sections(const std::string& answer, const std::string& name) {
    int64_t n = 0;
    for (size_t at = 0; (at = answer.find(name, at)) != std::string::npos; ++at) {
        size_t next = at + name.size();
        if (next < answer.size() && std::isspace(static_cast<unsigned char>(answer[next]))) ++next;
        n += next < answer.size() && answer[next] >= '0' && answer[next] <= '9';
    }
    return n;
}

// The marker at any place; "P.S." and "P.P.S" also with spaces between.
bool postscript(const std::string& answer, const std::string& marker) {
    std::string said = lower(answer), wanted = lower(strip(marker));
    if (wanted == "p.s." || wanted == "p.p.s") {
        for (size_t at = 0; (at = said.find(". ", at)) != std::string::npos; ++at)
            if (at > 0 && said[at - 1] == 'p') said.erase(at + 1, 1);
    }
    return said.find(wanted) != std::string::npos;
}

bool is_json(const std::string& answer) {
    std::string s = strip(answer);
    for (const char* fence : {"```json", "```Json", "```JSON", "```"}) {
        if (!s.starts_with(fence)) continue;
        s.erase(0, std::string(fence).size());
        break;
    }
    s = strip(s);
    if (s.ends_with("```")) s.resize(s.size() - 3);
    return json::accept(strip(s));
}

bool two_responses(const std::string& answer) {
    std::vector<std::string> parts;
    return paragraphs(answer, "******", &parts) && parts.size() == 2 && parts[0] != parts[1];
}

bool constrained(const std::string& answer) {
    for (const char* option : {"My answer is yes.", "My answer is no.", "My answer is maybe."})
        if (answer.find(option) != std::string::npos) return true;
    return false;
}

bool titled(const std::string& answer) {
    const auto titles = text::enclosed(answer, "<<", ">>");
    return std::any_of(titles.begin(), titles.end(), [](const std::string& t) { return not_blank(strip(t, "<> \t")); });
}

bool quoted(const std::string& answer) {
    const std::string s = strip(answer);
    return s.size() > 1 && s.front() == '"' && s.back() == '"';
}

const std::map<std::string, Kind>& kinds() {
    static const std::map<std::string, Kind> all{
        {"keywords:existence",
         {{},
          {},
          {"keywords"},
          [](const json& a, const std::string& s) {
              return std::all_of(a.at("keywords").begin(), a.at("keywords").end(),
                                 [&](const json& w) { return lower(s).find(lower(w)) != std::string::npos; });
          }}},
        {"keywords:forbidden_words",
         {{},
          {},
          {"forbidden_words"},
          [](const json& a, const std::string& s) {
              return std::none_of(a.at("forbidden_words").begin(), a.at("forbidden_words").end(),
                                  [&](const json& w) { return text::has_word(lower(s), lower(w)); });
          }}},
        {"keywords:frequency",
         {{"keyword", "relation"},
          {"frequency"},
          {},
          [](const json& a, const std::string& s) {
              return holds(a, "relation", "frequency", text::count(lower(s), lower(strip(a.at("keyword")))));
          }}},
        {"keywords:letter_frequency",
         {{"letter", "let_relation"},
          {"let_frequency"},
          {},
          [](const json& a, const std::string& s) {
              return holds(a, "let_relation", "let_frequency", text::count(lower(s), lower(a.at("letter"))));
          }}},
        {"length_constraints:number_paragraphs",
         {{},
          {"num_paragraphs"},
          {},
          [](const json& a, const std::string& s) {
              std::vector<std::string> parts;
              return paragraphs(s, "***", &parts) && int64_t(parts.size()) == a.at("num_paragraphs").get<int64_t>();
          }}},
        {"length_constraints:number_words",
         {{"relation"},
          {"num_words"},
          {},
          [](const json& a, const std::string& s) {
              return holds(a, "relation", "num_words", int64_t(text::words(s).size()));
          }}},
        {"length_constraints:nth_paragraph_first_word",
         {{"first_word"}, {"num_paragraphs", "nth_paragraph"}, {}, nth_first_word}},
        {"detectable_content:number_placeholders",
         {{},
          {"num_placeholders"},
          {},
          [](const json& a, const std::string& s) {
              return int64_t(text::enclosed(s, "[", "]").size()) >= a.at("num_placeholders").get<int64_t>();
          }}},
        {"detectable_content:postscript",
         {{"postscript_marker"},
          {},
          {},
          [](const json& a, const std::string& s) { return postscript(s, a.at("postscript_marker")); }}},
        {"detectable_format:number_bullet_lists",
         {{},
          {"num_bullets"},
          {},
          [](const json& a, const std::string& s) { return bullets(s) == a.at("num_bullets").get<int64_t>(); }}},
        {"detectable_format:number_highlighted_sections",
         {{},
          {"num_highlights"},
          {},
          [](const json& a, const std::string& s) { return highlights(s) >= a.at("num_highlights").get<int64_t>(); }}},
        {"detectable_format:multiple_sections",
         {{"section_spliter"},
          {"num_sections"},
          {},
          [](const json& a, const std::string& s) {
              return sections(s, a.at("section_spliter")) >= a.at("num_sections").get<int64_t>();
          }}},
        {"combination:repeat_prompt",
         {{"prompt_to_repeat"},
          {},
          {},
          [](const json& a, const std::string& s) {
              return lower(strip(s)).starts_with(lower(strip(a.at("prompt_to_repeat"))));
          }}},
        {"startend:end_checker",
         {{"end_phrase"},
          {},
          {},
          [](const json& a, const std::string& s) {
              return lower(strip(strip(s), "\"")).ends_with(lower(strip(a.at("end_phrase"))));
          }}},
        {"change_case:capital_word_frequency",
         {{"capital_relation"},
          {"capital_frequency"},
          {},
          [](const json& a, const std::string& s) {
              const std::vector<std::string> words = text::words(s);
              return holds(a, "capital_relation", "capital_frequency",
                           std::count_if(words.begin(), words.end(), text::all_upper));
          }}},
        {"detectable_format:json_format", {{}, {}, {}, [](const json&, const std::string& s) { return is_json(s); }}},
        {"detectable_format:constrained_response",
         {{}, {}, {}, [](const json&, const std::string& s) { return constrained(s); }}},
        {"detectable_format:title", {{}, {}, {}, [](const json&, const std::string& s) { return titled(s); }}},
        {"combination:two_responses", {{}, {}, {}, [](const json&, const std::string& s) { return two_responses(s); }}},
        {"startend:quotation", {{}, {}, {}, [](const json&, const std::string& s) { return quoted(s); }}},
        {"change_case:english_capital",
         {{}, {}, {}, [](const json&, const std::string& s) { return text::all_upper(s); }}},
        {"change_case:english_lowercase",
         {{}, {}, {}, [](const json&, const std::string& s) { return text::all_lower(s); }}},
        {"punctuation:no_comma",
         {{}, {}, {}, [](const json&, const std::string& s) { return s.find(',') == std::string::npos; }}}};
    return all;
}

bool is_list_of_texts(const json& j) {
    return j.is_array() && std::all_of(j.begin(), j.end(), [](const json& x) { return x.is_string(); });
}

} // namespace

const std::vector<std::string>& checkable_kinds() {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> out;
        for (const auto& [name, kind] : kinds())
            out.push_back(name);
        return out;
    }();
    return names;
}

const std::vector<std::string>& unchecked_kinds() {
    static const std::vector<std::string> names{"language:response_language", "length_constraints:number_sentences"};
    return names;
}

Status validate(const Instruction& instruction) {
    const auto wrong = [&](const char* field, const char* what) {
        return Status(StatusCode::invalid_argument,
                      fmt::format("{} needs {} in its argument '{}'", instruction.kind, what, field));
    };
    const auto found = kinds().find(instruction.kind);
    if (found == kinds().end()) {
        return {StatusCode::invalid_argument, fmt::format("unknown kind of instruction '{}'", instruction.kind)};
    }
    const json& a = instruction.arguments;
    const auto has = [&](const char* field) { return a.is_object() && a.contains(field); };
    for (const char* field : found->second.texts)
        if (!has(field) || !a[field].is_string()) return wrong(field, "a text");
    for (const char* field : found->second.numbers)
        if (!has(field) || !a[field].is_number_integer()) return wrong(field, "a whole number");
    for (const char* field : found->second.lists)
        if (!has(field) || !is_list_of_texts(a[field])) return wrong(field, "a list of texts");
    return {};
}

bool kept(const Instruction& instruction, const std::string& answer) {
    return not_blank(answer) && kinds().at(instruction.kind).kept(instruction.arguments, answer);
}

Result<InstructedPrompts> read_ifeval(const std::string& path) {
    const Result<Records> records = read_records(path, {"prompt"});
    if (!records) return records.status();
    InstructedPrompts out;
    out.sha256 = records->sha256;
    for (size_t i = 0; i < records->items.size(); ++i) {
        const json& record = records->items[i];
        const auto wrong = [&](const std::string& why) {
            return Status(StatusCode::invalid_argument, fmt::format("{}, line {}: {}", path, records->lines[i], why));
        };
        if (!record.contains("key") || !record["key"].is_number_integer()) return wrong("has no number in 'key'");
        if (!record.contains("instruction_id_list") || !is_list_of_texts(record["instruction_id_list"])) {
            return wrong("has no list of texts in 'instruction_id_list'");
        }
        const json& ids = record["instruction_id_list"];
        if (!record.contains("kwargs") || !record["kwargs"].is_array() || record["kwargs"].size() != ids.size()) {
            return wrong("'kwargs' is no list as long as 'instruction_id_list'");
        }
        InstructedPrompt prompt{record["key"], record["prompt"], {}};
        bool checkable = true;
        for (size_t k = 0; k < ids.size(); ++k) {
            Instruction instruction{ids[k], record["kwargs"][k]};
            const auto& unchecked = unchecked_kinds();
            if (std::find(unchecked.begin(), unchecked.end(), instruction.kind) != unchecked.end()) {
                checkable = false;
                continue;
            }
            if (Status bad = validate(instruction); !bad) return wrong(bad.message());
            prompt.instructions.push_back(std::move(instruction));
        }
        if (checkable)
            out.items.push_back(std::move(prompt));
        else
            ++out.left_out;
    }
    return out;
}

} // namespace kvmosaic::eval
