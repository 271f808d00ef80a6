// What a calibration pass found for one model: arrays by name, layer, KV head and side, in a text file that a person
// can read. One record a line:
//
//   kvmosaic-calibration 1
//   method NAME
//   model FINGERPRINT                         of the weights, or `unknown`
//   layers L
//   layer I H G DK DV                         L lines; G = 0: the layer keeps no K/V
//   tokens N                                  of the calibration text
//   text WHAT                                 its SHA-256 or a name; the rest of the line
//   array NAME LAYER HEAD SIDE COUNT V V ...  -1 for LAYER or HEAD: of all; SIDE is `key` or `value`; nine digits
//   checksum HEX                              the last line: FNV-1a, 64 bits, over all bytes before it
//
// Which arrays a method reads stands in docs/methods.md. A file that is damaged, of another method or of another model
// is refused, and the message names the file and the field.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvmosaic/shape.h"
#include "kvmosaic/status.h"

namespace kvmosaic {

struct CalibrationArray {
    std::string name;              // letters, digits, '_'
    int32_t layer = -1, head = -1; // -1: of all
    Side side = Side::key;
    std::vector<float> values;
};

struct Calibration {
    std::string method;
    std::string fingerprint = "unknown"; // of the model's weights (ModelShape::fingerprint)
    std::vector<LayerShape> layers;      // [L] sizes only
    int64_t tokens = 0;                  // of the calibration text
    std::string text = "unknown";        // which text it was
    std::vector<CalibrationArray> arrays;
    std::string path;      // where it was read from, for messages; not written
    uint64_t checksum = 0; // of the file that was read; not written

    // Sizes, name and fingerprint of a model (no fingerprint there: `unknown`).
    void describe(const ModelShape& shape);
    void add(std::string name, int32_t layer, int32_t head, Side side, std::vector<float> values);
    // Null where there is none. The first of several equal ones.
    const std::vector<float>* find(std::string_view name, int32_t layer, int32_t head, Side side) const;
    // The array if it has `count` values; else a sentence that names file and field.
    Result<const std::vector<float>*> need(std::string_view name, int32_t layer, int32_t head, Side side,
                                           int64_t count) const;
    // A refusal that names the file, the array and what is wrong with it.
    Status wrong(std::string_view name, int32_t layer, int32_t head, Side side, const std::string& what) const;
    // ok if the file is of this method; else the field.
    Status fits(std::string_view method) const;
    // ok if the file is of this model: layer count, sizes, and the fingerprint where both are known; else the field.
    Status fits(const ModelShape& shape) const;
};

Result<Calibration> read_calibration(const std::string& path);
// Refuses what would not read back. Writes beside the target, then renames: a reader sees the old file or the new one.
Status write_calibration(const std::string& path, const Calibration& calibration);

} // namespace kvmosaic
