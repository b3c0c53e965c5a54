// Ranges cover the items once, in as many threads as the runtime grants; the choice of kernels.
#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "check.h"

namespace anychip::cpu::test {
namespace {

void test_items_covered_once(int64_t items, int threads) {
  omp_set_num_threads(threads);
  std::vector<std::atomic<int>> visits(static_cast<size_t>(items));
  parallel_items(items, kElementsPerThread, [&](Range range) {
    for (int64_t i = range.begin; i < range.end; ++i) ++visits[static_cast<size_t>(i)];
  });
  for (const auto& count : visits) check_that(count == 1, "every item once");
}

void test_elements_begin_at_blocks(int64_t numel) {
  omp_set_num_threads(3);
  std::atomic<int64_t> covered{0};
  parallel_elements(numel, [&](Range range) {
    check_that(range.begin % 1024 == 0, "a range begins at a multiple of 1024");
    covered += range.end - range.begin;
  });
  check_that(covered == numel, "all elements covered");
}

int threads_used(int64_t items, int64_t elements_per_item) {
  std::mutex mutex;
  std::set<std::thread::id> seen;
  parallel_items(items, elements_per_item, [&](Range) {
    const std::lock_guard<std::mutex> lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  return static_cast<int>(seen.size());
}

void test_number_of_threads() {
  omp_set_num_threads(4);
  check_that(num_threads() == 4, "num_threads follows the runtime");
  check_that(threads_used(kElementsPerThread, 1) == 1, "a small loop stays on its thread");
  check_that(threads_used(4 * kElementsPerThread, 1) == 4, "a large loop uses all threads");
  check_that(threads_used(2, 10 * kElementsPerThread) == 2, "no more threads than items");
  omp_set_num_threads(1);
  check_that(threads_used(4 * kElementsPerThread, 1) == 1, "one thread when one is allowed");
}

void test_openmp_status() {
  check_that(!openmp_status().ok, "no runtime before one was bound");
  check_that(num_threads() == 1, "one thread without a runtime");
  check_that(threads_used(100, kElementsPerThread) == 1, "loops run without a runtime");
  check_throws<std::runtime_error>("import torch first", [] { bind_openmp("libabsent.so"); });
  bind_linked_openmp();
  check_that(!openmp_status().library.empty(), "the runtime has a path");
}

void test_isas() {
  for (const KernelTable* table : available_tables()) {
    set_isa(table->name);
    check_that(std::string(kernels().name) == table->name, "set_isa chooses the kernels");
  }
  check_throws<std::invalid_argument>("(baseline", [] { set_isa("abacus"); });
}

}  // namespace
}  // namespace anychip::cpu::test

int main() {
  using namespace anychip::cpu::test;
  test_openmp_status();
  for (const int threads : {1, 2, 5}) {
    for (const int64_t items : {0, 1, 2, 5, 7, 64}) test_items_covered_once(items, threads);
  }
  for (const int64_t numel : {0, 1, 1024, 1025, 100003}) test_elements_begin_at_blocks(numel);
  test_number_of_threads();
  test_isas();
  return report("parallel");
}
