// A file of JSON lines that an interrupted run goes on from: the first says what the others are of.
#pragma once

#include <functional>
#include <string>

#include <nlohmann/json.hpp>

namespace kvmosaic::tool {

class Lines {
public:
    // Reads what is there. The verb ends where the file is none of `what` ("passkey results": the head's `kind`), or
    // differs in a field of the head, or is in use. Without a path nothing is kept.
    Lines(std::string path, const nlohmann::ordered_json& head, const std::string& what);
    ~Lines();
    Lines(const Lines&) = delete;
    Lines& operator=(const Lines&) = delete;

    // Calls take(line) for each that was found; one that it cannot read ends the verb.
    void each(const std::function<void(const nlohmann::ordered_json&)>& take) const;
    void add(const nlohmann::ordered_json& line); // one line, on disk when it returns

private:
    std::string path_;
    std::vector<std::pair<int, nlohmann::ordered_json>> found_; // number of the line
    int file_ = -1;
};

// Text of results: bytes that are no UTF-8 are replaced.
std::string dump(const nlohmann::ordered_json& json, int indent = -1);

} // namespace kvmosaic::tool
