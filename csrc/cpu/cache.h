// Which results are written past the caches.
//
// Note [Past the caches]: a store first reads the line that it writes to, a third of the traffic of
// a loop that reads as much as it writes. A store past the caches does not. It pays where what a
// call reads and writes does not fit in the last cache, so that whoever reads the result finds its
// beginning in memory either way: on an AMD EPYC with a cache of 32 MiB, relu of 16 MiB and a sum
// over its result take 0.75 of the time, of 8 MiB 1.09. Only loops that wait for memory gain: GELU
// takes as long either way, SwiGLU's backward with its two results 1.4 times.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace anychip::cpu {

constexpr int64_t kVectorElements = 16;
// Whether a call that reads and writes so many bytes stores these tensors past the caches, by
// vectors that begin at multiples of `width` elements and of a vector from there.
bool is_past_caches(int64_t nbytes, std::initializer_list<const void*> written, int64_t width);

// Bytes of the last cache from now on, for tests; -1: as the system says.
void set_last_cache(int64_t nbytes);

}  // namespace anychip::cpu
