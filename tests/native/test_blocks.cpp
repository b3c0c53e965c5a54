// Blocks of host memory (csrc/host/blocks.h): sizes, alignment, what is used again, limits,
// threads. Argument: how many threads; run with ThreadSanitizer too.
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "blocks.h"

namespace {

using namespace anychip::host;

int failures = 0;

void check(bool condition, const char* what) {
  if (condition) return;
  ++failures;
  std::printf("FAILED: %s\n", what);
}

constexpr size_t kMiB = size_t{1} << 20;

void check_sizes() {
  for (size_t nbytes = kLeastNbytes; nbytes < 512 * kMiB; nbytes += nbytes / 7 + 1) {
    const size_t got = class_nbytes(nbytes);
    check(got >= nbytes && got - nbytes <= nbytes / kClassesPerDoubling,
          "a class is a little more");
    check(got % kPageNbytes == 0 && class_nbytes(got) == got, "a class is its own class, in pages");
  }
}

void check_reuse() {
  Blocks blocks(64 * kMiB, true);
  auto* first = static_cast<char*>(blocks.allocate(5 * kMiB));
  check(reinterpret_cast<uintptr_t>(first) % kHugeNbytes == 0, "large blocks begin at 2 MiB");
  std::memset(first, 1, 5 * kMiB);
  check(blocks.release(first) && !blocks.release(first), "a block is released once");
  check(blocks.allocate(4 * kMiB + kMiB / 2) == first, "a request of one class less gets it");
  check(blocks.release(first), "it is in use again");
  void* half = blocks.allocate(5 * kMiB / 2);
  check(half != first, "a request of half of it does not");
  void* again = blocks.allocate(5 * kMiB);
  check(again == first, "the same size does");
  const Statistics found = blocks.statistics();
  check(found.taken == 2 && found.reused == 2, "two from the system, two again");
  check(found.allocated == found.reserved && found.peak_allocated == found.allocated, "all in use");
  check(blocks.release(half) && blocks.release(again), "the end");
  check(blocks.statistics().allocated == 0, "none in use");
  blocks.reset_peak();
  check(blocks.statistics().peak_allocated == 0, "the peak begins anew");
}

void check_limits() {
  Blocks blocks(8 * kMiB, false);
  void* a = blocks.allocate(4 * kMiB);
  void* b = blocks.allocate(4 * kMiB);
  void* c = blocks.allocate(3 * kMiB);
  for (void* block : {a, b, c}) blocks.release(block);
  check(blocks.statistics().reserved == 7 * kMiB, "the one that has been free longest is gone");
  check(blocks.allocate(4 * kMiB) == b, "and the others are there");
  blocks.trim(0);
  check(blocks.statistics().reserved == 4 * kMiB, "what is in use stays");
  blocks.release(b);
  blocks.set_limit(0, true);
  check(blocks.statistics().reserved == 0, "a limit of none keeps none");
  check(blocks.allocate(size_t{1} << 62) == nullptr, "more than there are addresses");
}

// The system has no more: free blocks go back to it, and only then is there none to be had.
void check_exhaustion() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  rlimit before;
  getrlimit(RLIMIT_AS, &before);
  Blocks blocks(kMostNbytes, false);
  void* large = blocks.allocate(512 * kMiB);
  blocks.release(large);
  FILE* status = std::fopen("/proc/self/statm", "r");
  unsigned long pages = 0;
  check(status != nullptr && std::fscanf(status, "%lu", &pages) == 1, "statm");
  if (status != nullptr) std::fclose(status);
  rlimit tight = before;
  tight.rlim_cur = pages * kPageNbytes + 256 * kMiB;
  setrlimit(RLIMIT_AS, &tight);
  rlimit now;
  getrlimit(RLIMIT_AS, &now);
  if (now.rlim_cur != tight.rlim_cur) {  // qemu's emulation of a user's program ignores it
    std::printf("not asked: what happens without room, for no limit of memory holds here\n");
    return;
  }
  void* other = blocks.allocate(700 * kMiB);
  check(other != nullptr, "free blocks of other sizes make room");
  check(blocks.allocate(700 * kMiB) == nullptr, "null where there is no room");
  setrlimit(RLIMIT_AS, &before);
  check(blocks.release(other), "the one that there was");
#endif
}

// Each block belongs to one thread at a time: it is filled with its owner and found so.
void check_threads(int count) {
  Blocks blocks(32 * kMiB, true);
  std::vector<std::thread> threads;
  std::vector<int> wrong(count);
  for (int id = 0; id < count; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937 random(id);
      std::vector<std::pair<unsigned char*, size_t>> mine;
      for (int turn = 0; turn < 4000; ++turn) {
        if (mine.size() < 6 && random() % 2) {
          const size_t nbytes = kLeastNbytes << (random() % 6);
          auto* block = static_cast<unsigned char*>(blocks.allocate(nbytes));
          block[0] = block[nbytes / 2] = block[nbytes - 1] = static_cast<unsigned char>(id);
          mine.push_back({block, nbytes});
        } else if (!mine.empty()) {
          const auto [block, nbytes] = mine.back();
          mine.pop_back();
          for (const size_t at : {size_t{0}, nbytes / 2, nbytes - 1}) wrong[id] += block[at] != id;
          wrong[id] += !blocks.release(block);
        }
        if (turn % 500 == 0) blocks.trim(random() % (16 * kMiB));
      }
      for (const auto& [block, nbytes] : mine) blocks.release(block);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int each : wrong) check(each == 0, "a block belonged to two threads");
  check(blocks.statistics().allocated == 0, "every block was given back");
}

}  // namespace

int main(int argc, char** argv) {
  check_sizes();
  check_reuse();
  check_limits();
  check_exhaustion();
  check_threads(argc > 1 ? std::atoi(argv[1]) : 4);
  std::printf("test_blocks: %d failed\n", failures);
  return failures == 0 ? 0 : 1;
}
