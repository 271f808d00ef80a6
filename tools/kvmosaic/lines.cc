#include "kvmosaic/lines.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "kvmosaic/app.h"

namespace kvmosaic::tool {

using nlohmann::ordered_json;

std::string dump(const ordered_json& json, int indent) {
    return json.dump(indent, ' ', false, ordered_json::error_handler_t::replace);
}

Lines::Lines(std::string path, const ordered_json& head, const std::string& what) : path_(std::move(path)) {
    if (path_.empty()) return;
    file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file_ < 0) fail("--resume {}: {}", path_, std::strerror(errno));
    if (::flock(file_, LOCK_EX | LOCK_NB) != 0) fail("--resume {}: another run is writing to it", path_);
    const std::string old = take(eval::read_file(path_));
    size_t at = 0;
    for (int number = 1; at < old.size(); ++number) {
        const size_t end = old.find('\n', at);
        if (end == std::string::npos) break; // a line that was not finished
        const ordered_json line = ordered_json::parse(old.substr(at, end - at), nullptr, false);
        if (number == 1) {
            if (!line.is_object() || !line.contains("kind") || line["kind"] != head["kind"]) break;
            for (const auto& [field, value] : head.items()) {
                if (line.contains(field) && line[field] == value) continue;
                bad_usage("--resume {}: belongs to another run ({} is {} there, {} here); name a new file", path_,
                          field, line.contains(field) ? line[field].dump() : "not", value.dump());
            }
        } else {
            found_.emplace_back(number, line);
        }
        at = end + 1;
    }
    if (at == 0 && !old.empty()) bad_usage("--resume {}: is not a file of {}; name a new file", path_, what);
    if (::ftruncate(file_, off_t(at)) != 0) fail("--resume {}: {}", path_, std::strerror(errno));
    if (at == 0) add(head);
}

Lines::~Lines() {
    if (file_ >= 0) ::close(file_);
}

void Lines::each(const std::function<void(const ordered_json&)>& take) const {
    for (const auto& [number, line] : found_) {
        try {
            take(line);
        } catch (const nlohmann::json::exception& bad) {
            fail("--resume {}, line {}: is not a result: {}", path_, number, bad.what());
        }
    }
}

void Lines::add(const ordered_json& line) {
    if (file_ < 0) return;
    const std::string text = dump(line) + "\n";
    for (size_t at = 0; at < text.size();) {
        const ssize_t n = ::write(file_, text.data() + at, text.size() - at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail("--resume {}: {}", path_, std::strerror(errno));
        at += size_t(n);
    }
    if (::fsync(file_) != 0 && errno != EINVAL) fail("--resume {}: {}", path_, std::strerror(errno));
}

} // namespace kvmosaic::tool
