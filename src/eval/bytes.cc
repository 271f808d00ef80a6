#include "eval/bytes.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

namespace kvmosaic::eval {

namespace {

struct Unit {
    const char* names[3]; // in lower case
    double bytes;
};
constexpr Unit kUnits[] = {
    {{"k", "kib", ""}, 0x1p10}, {{"kb", "", ""}, 1e3}, {{"m", "mib", ""}, 0x1p20}, {{"mb", "", ""}, 1e6},
    {{"g", "gib", ""}, 0x1p30}, {{"gb", "", ""}, 1e9}, {{"t", "tib", ""}, 0x1p40}, {{"tb", "", ""}, 1e12},
};
constexpr double kLeast = 0x1p20, kMost = 0x1p50;

} // namespace

Result<int64_t> parse_bytes(const std::string& text) {
    double number = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
    std::string unit(rest, end);
    unit.erase(0, unit.find_first_not_of(' '));
    std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return char(std::tolower(c)); });
    double scale = 0;
    for (const Unit& known : kUnits)
        for (const char* name : known.names)
            if (!unit.empty() && unit == name) scale = known.bytes;
    if (error != std::errc() || scale == 0 || !std::isfinite(number)) {
        return Status(StatusCode::invalid_argument,
                      "a number and a unit are needed: 512MiB, 4GiB or 4G (powers of 1024), 4GB (4e9 bytes)");
    }
    const double bytes = number * scale;
    if (!(bytes >= kLeast && bytes <= kMost))
        return Status(StatusCode::invalid_argument, "1MiB to 1024TiB are possible");
    return int64_t(std::llround(bytes));
}

std::string bytes_text(int64_t bytes) {
    const double x = double(bytes);
    return std::fabs(x) < 0x1p30 ? fmt::format("{:.1f} MiB", x / 0x1p20) : fmt::format("{:.2f} GiB", x / 0x1p30);
}

} // namespace kvmosaic::eval
