#include "cache.h"

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>

namespace anychip::cpu {
namespace {

// Of what the first processor shares, as Linux tells; 0 where it does not: then nothing is stored
// past the caches. The C library's number is the whole socket's on some processors.
int64_t known_cache() {
  int64_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) +
                       "/size");
    int64_t size = 0;
    char unit = 0;
    if (file >> size >> unit) largest = std::max(largest, size << (unit == 'M' ? 20 : 10));
  }
  return largest;
}

std::atomic<int64_t> last_cache{known_cache()};

}  // namespace

void set_last_cache(int64_t nbytes) { last_cache = nbytes < 0 ? known_cache() : nbytes; }

bool is_past_caches(int64_t nbytes, std::initializer_list<const void*> written, int64_t width) {
  // Others need room in it too.
  const int64_t cache = last_cache.load(std::memory_order_relaxed);
  if (cache == 0 || nbytes <= cache / 4 * 3 || width % kVectorElements != 0) return false;
  return std::all_of(written.begin(), written.end(), [](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % 64 == 0;
  });
}

}  // namespace anychip::cpu
