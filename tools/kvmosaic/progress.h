// A bar on stderr for work that takes longer than two seconds; silent when stderr is not a terminal.
#pragma once

#include <chrono>
#include <string>

#include "eval/files.h"

namespace kvmosaic::tool {

class ProgressBar {
public:
    ProgressBar();
    ~ProgressBar();
    ProgressBar(const ProgressBar&) = delete;
    ProgressBar& operator=(const ProgressBar&) = delete;

    void show(const std::string& what, double share);
    void finish(); // wipes the line
    eval::Progress receiver() {
        return [this](const std::string& what, double share) { show(what, share); };
    }

private:
    using Clock = std::chrono::steady_clock;
    bool terminal_ = false, drawn_ = false;
    double share_ = 0;
    Clock::time_point start_, last_;
};

} // namespace kvmosaic::tool
