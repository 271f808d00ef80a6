#include "kvmosaic/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <fmt/format.h>
#include <unistd.h>

namespace kvmosaic::tool {

namespace {

constexpr double kQuietSeconds = 2.0, kRedrawSeconds = 0.2;
constexpr int kBarWidth = 30;

std::string duration(double seconds) {
    const int s = int(std::lround(seconds));
    return s < 3600 ? fmt::format("{}:{:02}", s / 60, s % 60)
                    : fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

} // namespace

ProgressBar::ProgressBar() : terminal_(::isatty(STDERR_FILENO) != 0), start_(Clock::now()), last_(start_) {}

ProgressBar::~ProgressBar() { finish(); }

void ProgressBar::show(const std::string& what, double share) {
    if (!terminal_) return;
    share = std::clamp(share, 0.0, 1.0);
    const auto now = Clock::now();
    // A share that falls is a new piece of work under the same bar: its time left must not count the old one.
    if (share < share_) start_ = now;
    share_ = share;
    const auto since = [now](Clock::time_point t) { return std::chrono::duration<double>(now - t).count(); };
    if (!drawn_ && since(start_) < kQuietSeconds) return;
    if (drawn_ && share < 1 && since(last_) < kRedrawSeconds) return;
    last_ = now;
    drawn_ = true;
    const int full = int(share * kBarWidth);
    const std::string left = share > 0.01 ? duration(since(start_) * (1 - share) / share) + " left" : "";
    fmt::print(stderr, "\r\033[K[{:#<{}}{:.<{}}] {:3.0f} % {} {}", "", full, "", kBarWidth - full, 100 * share, what,
               left);
    std::fflush(stderr);
}

void ProgressBar::finish() {
    if (drawn_) fmt::print(stderr, "\r\033[K");
    drawn_ = false;
}

} // namespace kvmosaic::tool
