// The smallest test harness that does: checks that count, and every configuration of the kernels.
#pragma once

#include <dlfcn.h>
#include <omp.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "parallel.h"

namespace anychip::cpu::test {

inline int failures = 0;
inline int checks = 0;

inline void check_that(bool condition, const std::string& what) {
  ++checks;
  if (condition) return;
  ++failures;
  if (failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}

// `call` must throw Error with a message that contains `text`.
template <class Error, class Call>
void check_throws(const char* text, const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    const bool found = std::string(error.what()).find(text) != std::string::npos;
    check_that(found, std::string("expected '") + text + "' in: " + error.what());
    return;
  }
  check_that(false, std::string("expected an error with '") + text + "', got none");
}

// The OpenMP runtime that this program is linked to stands for torch's.
inline void bind_linked_openmp() {
  Dl_info info;
  check_that(dladdr(reinterpret_cast<void*>(&omp_set_num_threads), &info) != 0, "OpenMP is linked");
  bind_openmp(info.dli_fname);
  check_that(openmp_status().ok, openmp_status().message);
}

// The outputs of one run, byte by byte.
using Bytes = std::vector<unsigned char>;

// Runs `run` with every instruction set and with 1, 2 and 5 threads, and checks that all results
// are the same bits. `run` returns the bytes of its outputs. The last configuration stays set.
inline void check_same_bits(const std::string& name, const std::function<Bytes()>& run) {
  Bytes first;
  bool is_first = true;
  for (const KernelTable* table : available_tables()) {
    set_isa(table->name);
    for (const int threads : {1, 2, 5}) {
      omp_set_num_threads(threads);
      const Bytes bytes = run();
      if (is_first) first = bytes;
      is_first = false;
      check_that(bytes == first, name + ": other bits with " + table->name + " and " +
                                     std::to_string(threads) + " threads");
    }
  }
}

inline int report(const char* program) {
  std::string names;
  for (const KernelTable* table : available_tables()) names += std::string(" ") + table->name;
  std::printf("%s: %d checks, %d failed; instruction sets:%s\n", program, checks, failures,
              names.c_str());
  return failures == 0 ? 0 : 1;
}

}  // namespace anychip::cpu::test
