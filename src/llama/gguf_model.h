// Checks on what the metadata means: architecture, hyperparameters, tokenizer. Only values with which libllama
// would assert, divide by zero or fail later at run time; everything else libllama names itself.
#pragma once

#include <string>
#include <vector>

#include "gguf_file.h"

namespace kvmosaic::gguf {

Status check_model(const File& file, std::vector<std::string>& warnings);

// Tensor types with which ggml's CPU kernels end the process when the weight is used.
Status check_weights(const File& file);

} // namespace kvmosaic::gguf
