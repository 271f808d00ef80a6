// The front of a search as a plot: bits against KL, defaults marked.
#pragma once

#include <string>

#include "eval/tune_report.h"

namespace kvmosaic::eval {

// An SVG element. With a text in `elsewhere` the front's points on that text are in it too.
Result<std::string> tune_plot(const Study& study, const TuneResult& result, const Elsewhere& elsewhere);

} // namespace kvmosaic::eval
