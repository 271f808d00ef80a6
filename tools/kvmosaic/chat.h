// A conversation in the words of the model's own chat template.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvmosaic/status.h"

struct llama_model;

namespace kvmosaic::tool {

class Chat {
public:
    static Result<Chat> open(const llama_model* model); // refuses a model without a template, or with a broken one
    Chat(Chat&&) noexcept;
    ~Chat();

    using Message = std::pair<std::string, std::string>; // role, content
    void add(std::string role, std::string content) { messages_.emplace_back(std::move(role), std::move(content)); }
    void extend(const std::string& content) { messages_.back().second += content; } // of the last message
    const std::vector<Message>& messages() const { return messages_; }
    // The whole conversation as text, open for the assistant's next answer.
    Result<std::string> render() const;

private:
    struct Template;
    explicit Chat(std::unique_ptr<Template> made);
    std::unique_ptr<Template> template_;
    std::vector<Message> messages_;
};

} // namespace kvmosaic::tool
