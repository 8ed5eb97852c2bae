// What other parts of the emulator ask of its CUDA runtime.
#pragma once
#include <string>

#include "cuda_runtime.h"

namespace emu {

bool fails(const std::string& call);  // logs a call; true for the one that must fail
cudaError_t failure();                // how it fails
int driver_version();                 // the newest CUDA that the driver knows

}  // namespace emu
