#include "eval/labels.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvmosaic::eval {

namespace {

double common(const Box& a, const Box& b) {
    const double w = std::min(a.right, b.right) - std::max(a.left, b.left);
    const double h = std::min(a.top, b.top) - std::max(a.bottom, b.bottom);
    return w > 0 && h > 0 ? w * h : 0;
}

Box around(double x, double y, double w, double h) { return {x - w / 2, x + w / 2, y - h / 2, y + h / 2}; }

} // namespace

void place_labels(std::vector<Label>* labels, double width, double height, double size, const std::vector<Box>& lines) {
    constexpr double kMarker = 9; // pixels
    std::vector<Box> taken = lines;
    for (const Label& l : *labels)
        taken.push_back(around(l.x, l.y, kMarker, kMarker));
    for (Label& l : *labels) {
        if (l.text.empty()) continue;
        const double w = 0.62 * size * double(l.text.size()), h = 1.1 * size;
        double best = std::numeric_limits<double>::infinity();
        for (int ring = 0; ring < 5; ++ring) {
            const double gap = kMarker / 2 + 2 + ring * 0.9 * h;
            // right, left, above, below, then the corners
            const double places[][2] = {{gap + w / 2, 0},    {-gap - w / 2, 0},   {0, gap + h / 2},
                                        {0, -gap - h / 2},   {gap + w / 2, gap},  {gap + w / 2, -gap},
                                        {-gap - w / 2, gap}, {-gap - w / 2, -gap}};
            for (const auto& place : places) {
                const Box box = around(l.x + place[0], l.y + place[1], w, h);
                double cost = 0.02 * ring * w * h;
                for (const Box& other : taken)
                    cost += common(box, other);
                const Box inside{0, width, 0, height};
                cost += 4 * (w * h - common(box, inside));
                if (cost >= best - 1e-9) continue;
                best = cost;
                l.at_x = l.x + place[0], l.at_y = l.y + place[1], l.led = ring > 0;
            }
        }
        taken.push_back(around(l.at_x, l.at_y, w, h));
    }
}

} // namespace kvmosaic::eval
