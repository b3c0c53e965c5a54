#include "parallel.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>

namespace anychip::cpu {
namespace {

// The part of the GNU OpenMP interface that we call; every OpenMP runtime on Linux has it.
struct Runtime {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  int (*max_threads)() = nullptr;
  int (*team_size)() = nullptr;
  int (*thread_index)() = nullptr;
};

Runtime runtime;
OpenMPStatus status{false, "The OpenMP runtime was not looked for yet.", ""};

std::string file_of(const void* symbol) {
  Dl_info info;
  return symbol && dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : "";
}

// The loader's own order for a symbol of that object: global scope, then its dependencies.
void* find_as_seen_by(void* object, const char* name) {
  void* global = dlsym(RTLD_DEFAULT, name);
  return global ? global : dlsym(object, name);
}

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// Other loaded objects that define GOMP_parallel: a second pool of threads, worth a word.
std::string other_runtimes(const std::string& ours) {
  struct Search {
    std::string ours, others;
  } search{ours, ""};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& found = *static_cast<Search*>(data);
        const std::string path = info->dlpi_name ? info->dlpi_name : "";
        void* object = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        if (!object) return 0;
        const void* symbol = dlsym(object, "GOMP_parallel");
        if (file_of(symbol) == path && path != found.ours) found.others += " " + path;
        dlclose(object);
        return 0;
      },
      &search);
  return search.others;
}

struct Team {
  int64_t items;
  RangeFunction function;
  const void* context;
  std::atomic<bool> failed{false};
  std::exception_ptr error = nullptr;  // the first, like no room for a thread's scratch
};

void run_share(void* data) {
  Team& team = *static_cast<Team*>(data);
  const int64_t size = runtime.team_size();
  const int64_t index = runtime.thread_index();
  const int64_t share = team.items / size, rest = team.items % size;
  const int64_t begin = index * share + std::min(index, rest);
  const int64_t end = begin + share + (index < rest ? 1 : 0);
  if (begin >= end) return;
  try {
    team.function(team.context, {begin, end});
  } catch (...) {  // past the runtime's frames it would end the process
    if (!team.failed.exchange(true)) team.error = std::current_exception();
  }
}

}  // namespace

void bind_openmp(const char* soname) {
  void* object = dlopen(soname, RTLD_LAZY | RTLD_NOLOAD);
  if (!object) {
    throw std::runtime_error(
        std::string(soname) +
        " is not loaded, and the kernels share its threads: import torch first");
  }
  runtime = {};
  void* symbol = find_as_seen_by(object, "GOMP_parallel");
  const std::string path = file_of(symbol);
  void* library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  Runtime found;
  if (!library || !find(library, "GOMP_parallel", found.parallel) ||
      !find(library, "omp_get_max_threads", found.max_threads) ||
      !find(library, "omp_get_num_threads", found.team_size) ||
      !find(library, "omp_get_thread_num", found.thread_index)) {
    status = {false,
              std::string(soname) +
                  " uses no OpenMP runtime that has GOMP_parallel: the kernels run "
                  "on one thread.",
              ""};
    return;
  }
  // torch gives a new thread its limit when the thread first asks torch for it, so ask torch.
  decltype(found.max_threads) torch_threads = nullptr;
  if (find(object, "_ZN2at15get_num_threadsEv", torch_threads)) found.max_threads = torch_threads;
  runtime = found;
  const std::string others = other_runtimes(path);
  status = {true, "The kernels use the OpenMP runtime of " + std::string(soname) + ": " + path,
            path};
  if (!others.empty()) status.message += " (also loaded, not used by either:" + others + ")";
}

OpenMPStatus openmp_status() { return status; }

int num_threads() { return runtime.max_threads ? runtime.max_threads() : 1; }

void run_ranges(int64_t items, int64_t elements_per_item, RangeFunction function,
                const void* context) {
  if (items <= 0) return;
  const int64_t elements = items * elements_per_item;
  const int64_t wanted = (elements + kElementsPerThread - 1) / kElementsPerThread;
  const int64_t threads = std::min<int64_t>({wanted, items, num_threads()});
  if (threads <= 1) {
    function(context, {0, items});
    return;
  }
  Team team{items, function, context};
  runtime.parallel(run_share, &team, static_cast<unsigned>(threads), 0);
  if (team.error) std::rethrow_exception(team.error);
}

}  // namespace anychip::cpu
