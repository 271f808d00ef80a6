// Errors as values. The library never throws, prints or aborts across its API (DESIGN.md, promise 6).
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace kvmosaic {

enum class StatusCode {
    ok = 0,
    invalid_argument, // a spec, option, shape or value outside its range; the message names it and the range
    not_found,        // a name, sequence or file that does not exist
    out_of_capacity,  // a context or byte limit would be exceeded; nothing was changed
    out_of_memory,    // the system refused memory; nothing was changed
    unsupported,      // legal, but this build or model cannot do it
    corrupt,          // a saved state that contradicts itself
};

// A code and one sentence that names what, where and the allowed range. Cheap to copy when ok.
class [[nodiscard]] Status {
public:
    Status() = default;
    Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

    bool ok() const { return code_ == StatusCode::ok; }
    explicit operator bool() const { return ok(); }
    StatusCode code() const { return code_; }
    const std::string& message() const { return message_; }

private:
    StatusCode code_ = StatusCode::ok;
    std::string message_;
};

// A value or the reason why there is none.
template <typename T>
class [[nodiscard]] Result {
public:
    Result(T value) : value_(std::move(value)) {}         // NOLINT: implicit on purpose
    Result(Status status) : status_(std::move(status)) {} // NOLINT: implicit on purpose

    bool ok() const { return value_.has_value(); }
    explicit operator bool() const { return ok(); }
    const Status& status() const { return status_; }
    T& operator*() { return *value_; }
    const T& operator*() const { return *value_; }
    T* operator->() { return &*value_; }
    const T* operator->() const { return &*value_; }

private:
    std::optional<T> value_;
    Status status_;
};

} // namespace kvmosaic
