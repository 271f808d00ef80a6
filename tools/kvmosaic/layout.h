// A page as a list of parts with byte offsets, for people and programs. All of it is read from the PageLayout.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "kvmosaic/store.h"

namespace kvmosaic::tool {

struct Part {
    std::string what;
    uint32_t offset = 0, bytes = 0;
};
std::vector<Part> parts_of(const PageLayout& page);

std::string ladder_text(const PageLayout& page); // "16:3 4:20 2:41", bits:channels
std::string draw(const PageLayout& page);
nlohmann::ordered_json to_json(const PageLayout& page);

} // namespace kvmosaic::tool
