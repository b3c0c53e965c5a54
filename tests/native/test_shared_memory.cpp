// Ranks that are threads, in memory that they share: collectives of two groups at once, each from
// threads of its own, and messages in any order; every value is compared. Also built with
// ThreadSanitizer, which sees what is read before it has been published.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "../../csrc/comm/collectives.h"
#include "../../csrc/comm/point_to_point.h"

using namespace anychip::comm;

namespace {

constexpr int kRanks = 3, kRounds = 60;

std::atomic<int> failures{0};

#define CHECK(condition)                                          \
  do {                                                            \
    if (!(condition) && ++failures <= 20) {                       \
      std::printf("FAILED: line %d: %s\n", __LINE__, #condition); \
    }                                                             \
  } while (false)

struct Rank {
  Rank(uint8_t* memory, int rank)
      : segment(memory, rank, kRanks, PointToPoint::channels_nbytes(kRanks)), messages(segment) {}
  Segment segment;
  PointToPoint messages;
};

Outcome outcome() { return {Clock::now() + std::chrono::seconds(60), 0, 0}; }

// Sizes around those of a buffer, and small ones.
size_t draw_numel(std::mt19937& draw) {
  const size_t room = Group::buffer_nbytes(kRanks) / sizeof(int32_t);
  const size_t bases[] = {1, 7, 4096, room / (kRanks - 1), room, 2 * room};
  return bases[draw() % 6] + draw() % 3;
}

int32_t value(int rank, size_t i) { return static_cast<int32_t>(i * 2654435761u) + rank * 977; }

std::vector<int32_t> values(int rank, size_t numel) {
  std::vector<int32_t> made(numel);
  for (size_t i = 0; i < numel; ++i) made[i] = value(rank, i);
  return made;
}

uint8_t* bytes(std::vector<int32_t>& data) { return reinterpret_cast<uint8_t*>(data.data()); }

bool is_sum(const int32_t* data, size_t first, size_t numel) {
  for (size_t i = 0; i < numel; ++i) {
    uint32_t sum = 0;
    for (int r = 0; r < kRanks; ++r) sum += static_cast<uint32_t>(value(r, first + i));
    if (static_cast<uint32_t>(data[i]) != sum) return false;
  }
  return true;
}

// One call of each kind, of a size that all ranks draw alike.
void collectives_round(Group& group, int rank, size_t numel, uint64_t& ticket) {
  const auto make = [&](auto call) {
    Outcome found = outcome();
    CHECK(group.in_turn(ticket, static_cast<uint32_t>(ticket + 1), found, call) == kDone);
    ++ticket;
  };
  std::vector<int32_t> data = values(rank, numel);
  make([&] { return group.all_reduce(bytes(data), numel, 4, DType::kI32, Reduction::kSum); });
  CHECK(is_sum(data.data(), 0, numel));

  std::vector<int64_t> sizes(kRanks), nbytes(kRanks);
  for (int r = 0; r < kRanks; ++r) sizes[r] = r == 0 ? 0 : numel / (r + 1);
  for (int r = 0; r < kRanks; ++r) nbytes[r] = sizes[r] * 4;
  size_t whole = 0, first = 0;
  for (int r = 0; r < kRanks; ++r) first += r < rank ? sizes[r] : 0, whole += sizes[r];
  data = values(rank, whole);
  std::vector<int32_t> part(sizes[rank]);
  make([&] {
    return group.reduce_scatter(bytes(part), bytes(data), sizes.data(), 4, DType::kI32,
                                Reduction::kSum);
  });
  CHECK(is_sum(part.data(), first, part.size()));
  std::vector<int32_t> all(whole);
  make([&] { return group.all_gather(bytes(all), bytes(part), nbytes.data()); });
  CHECK(is_sum(all.data(), 0, whole));

  const int source = static_cast<int>(numel % kRanks);
  data = values(rank, numel);
  make([&] { return group.broadcast(bytes(data), numel * 4, source); });
  CHECK(data == values(source, numel));

  // Rank s sends d so many elements of values(s) as both their numbers say.
  std::vector<std::vector<int32_t>> to(kRanks), from(kRanks);
  std::vector<uint8_t*> outputs(kRanks);
  std::vector<const uint8_t*> inputs(kRanks);
  std::vector<int64_t> sent(kRanks), rooms(kRanks);
  for (int r = 0; r < kRanks; ++r) {
    to[r] = values(rank, numel / (1 + rank + 2 * r));
    from[r].resize(numel / (1 + r + 2 * rank));
    inputs[r] = bytes(to[r]), outputs[r] = bytes(from[r]);
    sent[r] = to[r].size() * 4, rooms[r] = from[r].size() * 4;
  }
  make([&] { return group.all_to_all(outputs.data(), rooms.data(), inputs.data(), sent.data()); });
  for (int r = 0; r < kRanks; ++r) CHECK(from[r] == values(r, from[r].size()));
  make([&] { return group.barrier(); });
}

// Every rank sends every other some messages, small and large, and takes them from last to first.
void messages_round(Rank& mine, size_t numel, uint32_t base) {
  constexpr uint32_t kEach = 5;
  const int rank = mine.segment.rank();
  std::vector<std::vector<int32_t>> kept;
  std::vector<std::pair<Message*, size_t>> posted;
  kept.reserve(2 * kRanks * kEach);
  const auto post = [&](bool is_send, int peer, uint32_t i) {
    const size_t count = i % 2 != 0 ? numel : i + 1;
    kept.push_back(is_send ? values(rank + i, count) : std::vector<int32_t>(count));
    posted.emplace_back(mine.messages.post(is_send, peer, base + i, bytes(kept.back()), count * 4),
                        is_send ? 0 : peer + i + 1);
  };
  for (int peer = 0; peer < kRanks; ++peer) {
    for (uint32_t i = 0; peer != rank && i < kEach; ++i) post(true, peer, i);
    for (uint32_t i = kEach; peer != rank && i-- > 0;) post(false, peer, i);
  }
  for (size_t k = 0; k < posted.size(); ++k) {
    CHECK(mine.messages.wait(posted[k].first, outcome().deadline) == kDone);
    if (posted[k].second > 0) {
      CHECK(kept[k] == values(static_cast<int>(posted[k].second) - 1, kept[k].size()));
    }
  }
}

void run_rank(uint8_t* memory, int rank, int rounds) {
  Rank mine(memory, rank);
  const int ranks[] = {0, 1, 2};
  std::vector<std::thread> threads;
  for (int number = 0; number < 2; ++number) {
    threads.emplace_back([&, number] {
      Group group(mine.segment, number, ranks, rank, kRanks);
      std::mt19937 draw(number);
      uint64_t ticket = 0;
      for (int i = 0; i < rounds; ++i) collectives_round(group, rank, draw_numel(draw), ticket);
    });
    threads.emplace_back([&, number] {
      std::mt19937 draw(number);
      for (int i = 0; i < rounds; ++i) {
        messages_round(mine, draw_numel(draw), static_cast<uint32_t>(number * 100 + 1));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A rank whose call has another tag is waited for until the time is over; nothing is written.
void check_that_other_calls_exchange_nothing(uint8_t* memory) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([=] {
      Rank mine(memory, rank);
      const int ranks[] = {0, 1, 2};
      Group group(mine.segment, 2, ranks, rank, kRanks);
      std::vector<int32_t> data = values(rank, 100), before = data;
      Outcome found = {Clock::now() + std::chrono::milliseconds(100), 0, 0};
      const auto reduce = [&] {
        return group.all_reduce(bytes(data), data.size(), 4, DType::kI32, Reduction::kSum);
      };
      CHECK(group.in_turn(0, rank == 1 ? 8 : 7, found, reduce) == kLate);
      CHECK(data == before);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : kRounds;
  const size_t nbytes = Segment::head_nbytes(kRanks, PointToPoint::channels_nbytes(kRanks)) +
                        3 * Group::region_nbytes(kRanks);
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(kPage, nbytes));
  std::memset(memory, 0, nbytes);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(run_rank, memory, rank, rounds);
  for (std::thread& thread : threads) thread.join();
  check_that_other_calls_exchange_nothing(memory);
  std::free(memory);
  return failures > 0;
}
