#include "kvmosaic/chat.h"

#include <exception>

#include <chat.h> // llama.cpp's common library: templates are Jinja programs

namespace kvmosaic::tool {

struct Chat::Template {
    common_chat_templates_ptr program;
};

Chat::Chat(std::unique_ptr<Template> made) : template_(std::move(made)) {}
Chat::Chat(Chat&&) noexcept = default;
Chat::~Chat() = default;

Result<Chat> Chat::open(const llama_model* model) {
    if (!llama_model_chat_template(model, nullptr)) {
        return Status(StatusCode::invalid_argument, "this model has no chat template; use -p TEXT --raw");
    }
    try {
        auto made = std::make_unique<Template>();
        made->program = common_chat_templates_init(model, "");
        return Chat(std::move(made));
    } catch (const std::exception& bad) {
        return Status(StatusCode::unsupported,
                      std::string("the model's chat template cannot be read (use -p TEXT --raw): ") + bad.what());
    }
}

Result<std::string> Chat::render() const {
    common_chat_templates_inputs inputs;
    for (const auto& [role, content] : messages_) {
        common_chat_msg message;
        message.role = role;
        message.content = content;
        inputs.messages.push_back(std::move(message));
    }
    try {
        return common_chat_templates_apply(template_->program.get(), inputs).prompt;
    } catch (const std::exception& bad) {
        return Status(StatusCode::unsupported,
                      std::string("the model's chat template cannot take this conversation (use -p TEXT --raw): ") +
                          bad.what());
    }
}

} // namespace kvmosaic::tool
