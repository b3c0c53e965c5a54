#include "settings.h"

#include <cstdlib>

namespace cuda_emulator {
namespace {

const char* variable(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

uint64_t number(const char* name, uint64_t otherwise, uint64_t least, uint64_t most,
                std::string& problem) {
  const char* text = variable(name);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const uint64_t value = std::strtoull(text, &end, 0);
  if (*end == '\0' && *text != '-' && value >= least && value <= most) return value;
  problem = std::string(name) + ": expected a number from " + std::to_string(least) + " to " +
            std::to_string(most) + ", got '" + text + "'";
  return otherwise;
}

}  // namespace

Settings Settings::read(std::string& problem) {
  Settings settings;
  const std::string order =
      variable("ANYCHIP_EMULATOR_ORDER") ? variable("ANYCHIP_EMULATOR_ORDER") : "random";
  if (order == "forward") {
    settings.order = Order::kForward;
  } else if (order == "reverse") {
    settings.order = Order::kReverse;
  } else if (order == "warp") {
    settings.order = Order::kWarp;
  } else if (order != "random") {
    problem =
        "ANYCHIP_EMULATOR_ORDER: expected forward, reverse, random or warp, got '" + order + "'";
  }
  settings.seed = number("ANYCHIP_EMULATOR_SEED", 1, 0, UINT64_MAX, problem);
  settings.threads = static_cast<int>(number("ANYCHIP_EMULATOR_THREADS", 1, 1, 256, problem));
  settings.delayed = number("ANYCHIP_EMULATOR_DELAYED", 0, 0, 1, problem) == 1;
  settings.multiprocessors =
      static_cast<int>(number("ANYCHIP_EMULATOR_MULTIPROCESSORS", 4, 1, 1024, problem));
  settings.kept_fibers = number("ANYCHIP_EMULATOR_KEPT_FIBERS", 2048, 0, 1u << 20, problem);
  return settings;
}

}  // namespace cuda_emulator
