// quantize, dequantize and hadamard over the threads, which share groups of whole blocks.
#include <algorithm>
#include <memory>

#include "checks.h"
#include "parallel.h"

namespace anychip::cpu {
namespace {

// What a thread does at a time: as many blocks as stay in the first cache, or one. They begin at
// whole bytes of codes, also where a block is an odd number of half bytes.
class Groups {
 public:
  Groups(const char* where, int64_t numel, int64_t block) : numel_(numel) {
    check(block > 0, where, "expected block >= 1, got " + std::to_string(block));
    check_sizes(where, {{"block", block}});
    const int64_t whole = std::min(block, std::max<int64_t>(1, numel)) * (1 + block % 2);
    size_ = std::max<int64_t>(1, kElements / whole) * whole;
  }

  int64_t size() const { return size_; }

  // work(elements, scratch) for every group; make_scratch() once per thread.
  template <class MakeScratch, class Work>
  void run(const MakeScratch& make_scratch, const Work& work) const {
    parallel_items((numel_ + size_ - 1) / size_, size_, [&](Range groups) {
      const auto scratch = make_scratch();
      for (int64_t group = groups.begin; group < groups.end; ++group) {
        work(Range{group * size_, std::min(numel_, (group + 1) * size_)}, scratch);
      }
    });
  }

 private:
  static constexpr int64_t kElements = 4096;
  int64_t numel_, size_;
};

// Kernels read and write whole vectors of scratch.
constexpr int64_t kRoom = 128;

template <class T>
std::unique_ptr<T[]> room_for(bool needed, int64_t numel) {
  return std::unique_ptr<T[]>(needed ? new T[static_cast<size_t>(numel + kRoom)] : nullptr);
}

}  // namespace

void quantize(const Quantize& args) {
  const char* where = "quantize";
  if (check_sizes(where, {{"numel", args.numel}}) > 0) {
    check_address(where, "x", args.x);
    check_address(where, "codes", args.codes);
    check_address(where, "scales", args.scales);
  }
  struct Scratch {
    std::unique_ptr<float[]> values;
    std::unique_ptr<uint32_t[]> words;
    std::unique_ptr<uint8_t[]> codes;
  };
  const Groups groups(where, args.numel, args.block);
  groups.run(
      [&] {
        return Scratch{room_for<float>(args.dtype != DType::kFloat32, groups.size()),
                       room_for<uint32_t>(args.rng != nullptr, groups.size()),
                       room_for<uint8_t>(has_half_bytes(args.format), groups.size())};
      },
      [&](Range elements, const Scratch& scratch) {
        kernels().quantize(args, {scratch.values.get(), scratch.words.get(), scratch.codes.get()},
                           elements);
      });
}

void dequantize(const Dequantize& args) {
  const char* where = "dequantize";
  if (check_sizes(where, {{"numel", args.numel}}) > 0) {
    check_address(where, "codes", args.codes);
    check_address(where, "scales", args.scales);
    check_address(where, "y", args.y);
  }
  const Groups groups(where, args.numel, args.block);
  groups.run([&] { return room_for<uint8_t>(has_half_bytes(args.format), groups.size()); },
             [&](Range elements, const std::unique_ptr<uint8_t[]>& scratch) {
               kernels().dequantize(args, scratch.get(), elements);
             });
}

void hadamard(const Hadamard& args) {
  const char* where = "hadamard";
  if (check_sizes(where, {{"numel", args.numel}}) > 0) {
    check_address(where, "x", args.x);
    check_address(where, "y", args.y);
  }
  const Groups groups(where, args.numel, args.block);
  check((args.block & (args.block - 1)) == 0 && args.numel % args.block == 0, where,
        "expected whole blocks of a power of two, got " + std::to_string(args.numel) +
            " elements in blocks of " + std::to_string(args.block));
  groups.run([&] { return room_for<float>(true, groups.size()); },
             [&](Range elements, const std::unique_ptr<float[]>& scratch) {
               kernels().hadamard(args, scratch.get(), elements);
             });
}

}  // namespace anychip::cpu
