#include "file/atomic.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kvmosaic/file.h"

namespace kvmosaic {

namespace {

Status failed(const std::string& path, const char* what, int number) {
    const StatusCode code = number == ENOENT ? StatusCode::not_found : StatusCode::invalid_argument;
    return {code, path + ": " + what + ": " + std::strerror(number)};
}

// Closes on every way out.
struct Handle {
    int fd = -1;
    ~Handle() {
        if (fd >= 0) ::close(fd);
    }
    bool close() {
        const int had = fd;
        fd = -1;
        return ::close(had) == 0;
    }
};

std::string folder_of(const std::string& path) {
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return ".";
    return slash == 0 ? "/" : path.substr(0, slash);
}

} // namespace

namespace file {

System::System() : write(::write), sync(::fsync), rename([](const char* a, const char* b) { return ::rename(a, b); }) {}

Status replace_file(const std::string& wish, std::span<const uint8_t> bytes, const System& system) {
    std::string path = wish;
    struct stat old {};
    bool exists = ::stat(wish.c_str(), &old) == 0;
    if (exists && !S_ISREG(old.st_mode)) return failed(wish, "cannot be replaced, it is no plain file", EINVAL);
    if (char* real = exists ? ::realpath(wish.c_str(), nullptr) : nullptr; real) {
        path = real;
        std::free(real);
    }
    std::string beside = path + ".XXXXXX"; // the same folder, so that the rename is one step
    Handle out;
    out.fd = ::mkstemp(beside.data());
    if (out.fd < 0) return failed(wish, "cannot be written", errno);
    const auto give_up = [&](const char* what) {
        const int number = errno;
        ::unlink(beside.c_str());
        return failed(wish, what, number);
    };
    const mode_t mask = ::umask(0);
    ::umask(mask);
    if (::fchmod(out.fd, exists ? old.st_mode & 07777 : 0666 & ~mask) != 0) return give_up("cannot be written");
    for (size_t at = 0; at < bytes.size();) {
        const size_t part = std::min(bytes.size() - at, size_t(1) << 20);
        const ssize_t n = system.write(out.fd, bytes.data() + at, part);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            if (n == 0) errno = ENOSPC;
            return give_up("cannot be written");
        }
        at += size_t(n);
    }
    if (system.sync(out.fd) != 0) return give_up("cannot be written to the disk");
    if (!out.close()) return give_up("cannot be written");
    if (system.rename(beside.c_str(), path.c_str()) != 0) return give_up("cannot be replaced");
    Handle folder; // the new name is safe once the folder is; systems that cannot do this lose nothing else
    folder.fd = ::open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder.fd >= 0) (void)system.sync(folder.fd);
    return {};
}

} // namespace file

Result<std::vector<uint8_t>> read_file(const std::string& path) {
    Handle in;
    in.fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (in.fd < 0) return failed(path, "cannot be read", errno);
    struct stat about {};
    if (::fstat(in.fd, &about) != 0) return failed(path, "cannot be read", errno);
    if (!S_ISREG(about.st_mode)) return failed(path, "cannot be read, it is no plain file", EINVAL);
    try {
        std::vector<uint8_t> bytes(static_cast<size_t>(about.st_size));
        size_t have = 0;
        while (have < bytes.size()) {
            const ssize_t n = ::read(in.fd, bytes.data() + have, bytes.size() - have);
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) return failed(path, "cannot be read", errno);
            if (n == 0) break; // it became shorter; the checks of its contents say so
            have += size_t(n);
        }
        bytes.resize(have);
        return bytes;
    } catch (const std::bad_alloc&) {
        return Status(StatusCode::out_of_memory,
                      path + ": no memory for its " + std::to_string(about.st_size) + " bytes");
    }
}

} // namespace kvmosaic
