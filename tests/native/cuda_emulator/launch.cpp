#include "launch.h"

#include <atomic>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "failure.h"
#include "memory.h"
#include "multiprocessor.h"

namespace cuda_emulator {
namespace {

constexpr size_t kParameterBytes = 4096;

std::string text(dim3 size) {
  return "(" + std::to_string(size.x) + "," + std::to_string(size.y) + "," +
         std::to_string(size.z) + ")";
}

bool is_shape(dim3 grid, dim3 block) {
  const auto threads = uint64_t{block.x} * block.y * block.z;
  return threads > 0 && threads <= kMaxThreads && block.x <= 1024 && block.y <= 1024 &&
         block.z <= 64 && grid.x > 0 && grid.x <= 0x7fffffffu && grid.y > 0 && grid.y <= 65535 &&
         grid.z > 0 && grid.z <= 65535;
}

// The i-th block that runs, of `count`. A stride without a common divisor visits each once.
class BlockOrder {
 public:
  BlockOrder(const Settings& settings, uint64_t count) : count_(count) {
    if (settings.order == Order::kForward) return;
    first_ = count - 1;
    stride_ = count - 1;  // backwards
    if (settings.order == Order::kReverse) return;
    Random random(settings.seed);
    first_ = random.next() % count;
    do {
      stride_ = 1 + random.next() % count;
    } while (std::gcd(stride_, count) != 1);
  }
  uint64_t operator[](uint64_t i) const {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(i) * stride_ + first_) % count_);
  }

 private:
  uint64_t count_, first_ = 0, stride_ = 1;
};

// One for each thread of the host; they keep their stacks from launch to launch.
std::vector<std::unique_ptr<Multiprocessor>>& multiprocessors(size_t count) {
  static std::vector<std::unique_ptr<Multiprocessor>> all;
  while (all.size() < count) all.push_back(std::make_unique<Multiprocessor>());
  return all;
}

}  // namespace

cudaError_t check(const Launch& launch, size_t opted_in, std::string& why) {
  const std::string shape = "grid " + text(launch.grid) + ", block " + text(launch.block);
  if (!is_shape(launch.grid, launch.block)) {
    why = shape +
          ": expected 1 to 1024 threads per block and at most 64 in z, 1 to 2147483647 "
          "blocks in x and 1 to 65535 in y and z";
    return cudaErrorInvalidConfiguration;
  }
  const size_t most_shared = opted_in > 0 ? opted_in : kStaticShared;
  if (launch.dynamic_shared_bytes > most_shared) {
    why = shape + ": expected at most " + std::to_string(most_shared) +
          " bytes of dynamic shared memory, got " + std::to_string(launch.dynamic_shared_bytes) +
          "; cudaFuncSetAttribute allows up to " + std::to_string(kMostShared);
    return cudaErrorInvalidValue;
  }
  if (launch.parameter_bytes > kParameterBytes) {
    why = shape + ": expected at most 4096 bytes of parameters, got " +
          std::to_string(launch.parameter_bytes);
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t run_grid(const Launch& launch, const Settings& settings, size_t opted_in) {
  const dim3 grid = launch.grid;
  const uint64_t count = uint64_t{grid.x} * grid.y * grid.z;
  const BlockOrder order(settings, count);
  std::atomic<uint64_t> next{0};
  const auto run_blocks = [&](Multiprocessor& here, uint64_t number) {
    here.begin(launch, settings, opted_in, number);
    for (uint64_t i; !has_failed() && (i = next.fetch_add(1)) < count;) {
      const uint64_t block = order[i];
      here.run_block({static_cast<unsigned>(block % grid.x),
                      static_cast<unsigned>(block / grid.x % grid.y),
                      static_cast<unsigned>(block / grid.x / grid.y)});
    }
    here.end();
  };
  // The thread sanitizer's records of fibers are kept per thread of the host: one is enough.
  const uint64_t threads =
      kThreadSanitizer ? 1 : std::min<uint64_t>(count, static_cast<uint64_t>(settings.threads));
  auto& all = multiprocessors(threads);
  std::vector<std::thread> others;
  for (uint64_t number = 1; number < threads; ++number) {
    others.emplace_back([&, number] { run_blocks(*all[number], number); });
  }
  run_blocks(*all[0], 0);
  for (std::thread& other : others) other.join();
  return take_failure();
}

}  // namespace cuda_emulator
