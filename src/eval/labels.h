// Where the names of points go in a plot, so that they cover neither points nor each other.
#pragma once

#include <string>
#include <vector>

namespace kvmosaic::eval {

struct Box {
    double left = 0, right = 0, bottom = 0, top = 0;
};

struct Label {
    double x = 0, y = 0; // the point, pixels, y upwards
    std::string text;
    // Filled in: centre of the text, and whether a line should lead to it.
    double at_x = 0, at_y = 0;
    bool led = false;
};

// Texts are about 0.62 `size` wide a character and `size` high, and stay inside [0, width] x [0, height]. Greedy, in
// the order of the labels: the nearest free place, else the least covered one. `lines`: what else texts should not
// cover.
void place_labels(std::vector<Label>* labels, double width, double height, double size,
                  const std::vector<Box>& lines = {});

} // namespace kvmosaic::eval
