// Texts of an evaluation: a plain file, or records one a line.
#pragma once

#include <string>

#include "kvmosaic/status.h"

namespace kvmosaic::eval {

// The file as one text ("-": standard input). A name that ends in .jsonl or .jsonl.gz holds an object a line: its
// strings `question` and `answer` joined by a line end, or `prompt` and `canonical_solution` as they follow each other,
// whichever the first has; records are joined by an empty line. A line that is none is an error that names it.
Result<std::string> read_text(const std::string& path);

const std::string& sample_text(); // data/sample.txt, as it was when the program was built

} // namespace kvmosaic::eval
