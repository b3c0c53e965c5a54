// Everything that a kernel file needs instead of CUDA's headers, to be compiled by a C++17
// compiler. docs/cuda-emulator.md says how the emulator works and what it finds.
#pragma once

#include "atomics.h"
#include "float16.h"
#include "intrinsics.h"
#include "qualifiers.h"
#include "runtime_api.h"
#include "synchronization.h"
#include "vector_types.h"
