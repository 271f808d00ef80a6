// Texts of an evaluation: a plain file, or question-and-answer records one a line.
#pragma once

#include <string>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

// The file as one text ("-": standard input). A name that ends in .jsonl holds an object a line whose strings
// `question` and `answer` are joined by a line end, records by an empty line; a line that is none is an error that
// names it.
Result<std::string> read_text(const std::string& path);

const std::string& sample_text(); // data/sample.txt, as it was when the program was built

} // namespace kvmosaic::eval
