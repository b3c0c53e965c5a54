// Uses the bridge from eight threads on two devices and sixteen streams, for a sanitizer: without
// Python, whose lock orders what nothing else does. `driver BRIDGE CHIP`; the chip is asyncchip.
#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

namespace {

constexpr auto kChip = c10::DeviceType::PrivateUse1;
constexpr int kThreads = 8, kSteps = 12, kSide = 32;

template <class Function>
Function* function(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(2);
  }
  return reinterpret_cast<Function*>(found);
}

void wait(const c10::Stream& waits, const c10::Stream& until) {
  c10::Event event(kChip);
  event.record(until);
  event.block(waits);
}

// What a training step does: a product on a side stream, memory that both use, a gradient.
at::Tensor train(const at::TensorOptions& options, const c10::Stream& side) {
  const c10::impl::VirtualGuardImpl chip(kChip);
  const auto main = chip.getStream(options.device());
  auto w = at::full({kSide, kSide}, 1.0, options).requires_grad_();
  for (int step = 0; step < kSteps; ++step) {
    auto x = at::full({kSide, kSide}, 1.0 * step, options);
    at::Tensor y;
    wait(side, main);
    {
      const c10::StreamGuard on(side);
      y = x.matmul(w);
      x.record_stream(side);
    }
    wait(main, side);
    y.record_stream(main);
    (y * y).backward(at::ones_like(y));
  }
  return w.grad().cpu();
}

// What else reaches state that threads share. Returns the sum of 1000 sixes, by way of the device.
double rest(const at::TensorOptions& options, const c10::Stream& side, int number) {
  auto source = at::full({1000}, 6.0, at::TensorOptions().pinned_memory(true));
  auto into = at::zeros({1000}, at::TensorOptions().pinned_memory(true));
  {
    const c10::StreamGuard on(side);
    auto there = at::empty({1000}, options);
    there.copy_(source, true);
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(there.storage(), 8000);
    into.copy_(there, true);
  }
  source = at::Tensor();
  side.synchronize();
  at::rand({kSide}, options).erfinv_();  // on the host, with the device's generator
  auto* allocator = c10::getDeviceAllocator(kChip);
  if (number == 0) allocator->emptyCache({0, 0});
  if (number == 1) allocator->resetPeakStats(0);
  (void)allocator->getDeviceStats(options.device().index());
  return into.sum().item<double>();
}

}  // namespace

int main(int, char** words) {
  void* bridge = dlopen(words[1], RTLD_NOW | RTLD_GLOBAL);
  if (!bridge) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  if (function<int(const char*)>(bridge, "anychip_bridge_attach")(words[2])) {
    std::fprintf(stderr, "%s\n", function<const char*()>(bridge, "anychip_bridge_error")());
    return 2;
  }
  c10::register_privateuse1_backend("asyncchip");
  auto* calls = function<const char*(int, int)>(bridge, "anychip_bridge_calls");
  auto* profile = function<void(int)>(bridge, "anychip_bridge_profile");
  auto* profiled = function<const char*()>(bridge, "anychip_bridge_profiled");
  double expected = 0;
  for (int step = 0; step < kSteps; ++step) expected += 2.0 * kSide * (kSide * step) * step;

  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      try {
        const c10::Device device(kChip, static_cast<c10::DeviceIndex>(number % 2));
        const c10::DeviceGuard on_device(device);
        const c10::impl::VirtualGuardImpl chip(kChip);
        const c10::StreamGuard on_stream(chip.getStreamFromGlobalPool(device));
        const auto side = chip.getStreamFromGlobalPool(device, true);
        const at::TensorOptions options(device);
        if (number == 2) profile(1);
        wrong += !train(options, side).eq(expected).all().item<bool>();
        wrong += rest(options, side, number) != 6000;
        if (number == 2) wrong += std::string(profiled()).empty();
        if (number == 3) wrong += std::string(calls(1, 0)).empty();
      } catch (const c10::Error& error) {
        std::fprintf(stderr, "thread %d: %s\n", number, error.what_without_backtrace());
        ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  void* chip = dlopen(words[2], RTLD_NOW);
  const int misuses = function<int()>(chip, "asyncchip_misuses")();
  std::printf("%d wrong, %d misuses\n", wrong.load(), misuses);
  return wrong || misuses;
}
