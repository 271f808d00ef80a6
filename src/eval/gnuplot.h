// Plots are drawn by gnuplot, a program of its own that writes SVG (Debian's package gnuplot-nox).
#pragma once

#include <string>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

// ok, or that it is missing and the package that has it. Ask before any work that ends in a plot.
Status check_gnuplot();

// A text between single quotes, as gnuplot reads it back; control characters become spaces.
std::string gnuplot_text(const std::string& text);

// Draws `script` and returns the element <svg ...>...</svg> alone. The terminal is set here: `width` by `height`
// pixels, texts as they are (nothing in them is markup). `name` goes before every identifier in it, so that several
// plots may stand in one page.
Result<std::string> draw_svg(const std::string& name, int width, int height, const std::string& script);

} // namespace kvmosaic::eval
