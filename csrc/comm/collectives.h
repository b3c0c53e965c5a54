// Collectives of one group through memory that its ranks share, in steps.
//
// Every rank has two buffers, and writes its part of step s into buffer s % 2. Then it publishes
// the step, which also says that it has read all that it wants of step s - 1; so a buffer may be
// written again for step s when all ranks have published s - 1. What a rank publishes carries the
// tag of its call: ranks whose calls differ never see each other's steps, and read nothing. The
// calls of a group are made one after the other, in the order of their tickets, from whatever
// threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

#include "reduce.h"
#include "segment.h"

namespace anychip::comm {

// What a call is waited for with, and what came of it.
struct Outcome {
  Clock::time_point deadline;
  int peer;            // who was waited for when it failed, counted in the group
  int64_t nbytes = 0;  // of kWrong: what that rank sends
};

class Group {
 public:
  // Bytes of one buffer: what a core's cache holds, and enough for a part of each rank.
  static size_t buffer_nbytes(int world_size) {
    return std::clamp<size_t>(kBufferOfRank * world_size, kLeastBuffer, kMostBuffer);
  }
  static size_t region_nbytes(int world_size) {
    return world_size * (kPage + 2 * buffer_nbytes(world_size));
  }

  Group(Segment& segment, int number, const int* ranks, int rank, int size)
      : segment_(segment),
        world_ranks_(ranks, ranks + size),
        rank_(rank),
        size_(size),
        room_(buffer_nbytes(segment.world_size())),
        region_nbytes_(region_nbytes(segment.world_size())),
        base_(segment.map_group(number, region_nbytes_)),
        parts_(size) {}
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Makes `call`, which is a member function with its arguments bound, when the ones before are
  // done.
  template <class Call>
  Status in_turn(uint64_t ticket, uint32_t tag, Outcome& outcome, Call call) {
    {
      std::unique_lock<std::mutex> guard(lock_);
      while (turn_ != ticket && !has_failed_) {
        if (segment_.is_aborted()) return kLost;
        if (Clock::now() >= outcome.deadline) return kLate;
        turned_.wait_for(guard, std::chrono::nanoseconds(kSliceNs));
      }
      if (has_failed_) return kLost;
    }
    tag_ = tag;
    outcome_ = &outcome;
    const Status status = call();
    std::lock_guard<std::mutex> guard(lock_);
    turn_ = ticket + 1;
    has_failed_ = status != kDone;
    turned_.notify_all();
    return status;
  }

  Status barrier() {
    if (Status status = begin()) return status;
    publish();
    return await_all();
  }

  Status all_reduce(uint8_t* data, size_t numel, size_t itemsize, DType dtype, Reduction how) {
    const bool is_whole = size_ == 2 || numel * itemsize <= kSmall;
    const size_t step = (is_whole ? room_ : part_nbytes(0) * (size_ - 1)) / itemsize;
    for (size_t at = 0; at < numel; at += step) {
      const size_t count = std::min(step, numel - at);
      uint8_t* here = data + at * itemsize;
      if (Status status = is_whole ? reduce_whole(here, count, itemsize, dtype, how)
                                   : reduce_parts(here, count, itemsize, dtype, how)) {
        return status;
      }
    }
    return kDone;
  }

  // `sizes`: elements of each rank.
  Status reduce_scatter(uint8_t* output, const uint8_t* input, const int64_t* sizes,
                        size_t itemsize, DType dtype, Reduction how) {
    const size_t step = part_nbytes(0) / itemsize, most = *std::max_element(sizes, sizes + size_);
    for (size_t at = 0; at < most; at += step) {
      if (Status status = begin()) return status;
      const uint8_t* from = input;
      const uint8_t* mine = nullptr;
      for (int r = 0; r < size_; from += sizes[r++] * itemsize) {
        if (r == rank_) {
          mine = from + at * itemsize;
        } else {
          put(place(rank_, r) * step * itemsize, from + at * itemsize,
              left(sizes[r], at, step) * itemsize);
        }
      }
      publish();
      const size_t count = left(sizes[rank_], at, step);
      if (count == 0) continue;
      if (Status status = await_all()) return status;
      for (int r = 0; r < size_; ++r) parts_[r] = buffer(r) + place(r, rank_) * step * itemsize;
      parts_[rank_] = mine;
      reduce(output + at * itemsize, parts_.data(), size_, count, dtype, how);
    }
    return kDone;
  }

  // `sizes`: bytes of each rank.
  Status all_gather(uint8_t* output, const uint8_t* input, const int64_t* sizes) {
    const size_t most = *std::max_element(sizes, sizes + size_);
    std::vector<uint8_t*> places(size_);
    for (int r = 0; r < size_; output += sizes[r++]) places[r] = output;
    if (sizes[rank_] && places[rank_] != input) std::memmove(places[rank_], input, sizes[rank_]);
    for (size_t at = 0; at < most; at += room_) {
      if (Status status = begin()) return status;
      put(0, input + at, left(sizes[rank_], at, room_));
      publish();
      for (int i = 1; i < size_; ++i) {
        const int r = (rank_ + i) % size_;
        if (Status status = take(r, 0, places[r] + at, left(sizes[r], at, room_))) return status;
      }
    }
    return kDone;
  }

  Status broadcast(uint8_t* data, size_t nbytes, int source) {
    for (size_t at = 0; at < nbytes; at += room_) {
      const size_t count = std::min(room_, nbytes - at);
      if (Status status = begin()) return status;
      if (source == rank_) put(0, data + at, count);
      publish();
      if (source == rank_) continue;
      if (Status status = take(source, 0, data + at, count)) return status;
    }
    return kDone;
  }

  // Bytes to and from each rank, which are compared before anything is read: kWrong.
  Status all_to_all(uint8_t* const* outputs, const int64_t* rooms, const uint8_t* const* inputs,
                    const int64_t* sizes) {
    const size_t row_nbytes = size_ * sizeof(int64_t), part = part_nbytes(row_nbytes);
    size_t most = 0;
    for (size_t at = 0; at == 0 || at < most; at += part) {
      if (Status status = begin()) return status;
      if (at == 0) put(0, reinterpret_cast<const uint8_t*>(sizes), row_nbytes);
      for (int r = 0; r < size_; ++r) {
        const size_t count = left(sizes[r], at, part);
        if (r != rank_) put(row_nbytes + place(rank_, r) * part, inputs[r] + at, count);
      }
      publish();
      if (at == 0) {
        if (Status status = compare_sizes(rooms, most)) return status;
        if (outputs[rank_] != inputs[rank_]) {
          std::memmove(outputs[rank_], inputs[rank_], sizes[rank_]);
        }
      }
      for (int i = 1; i < size_; ++i) {
        const int r = (rank_ + i) % size_;
        const size_t count = left(rooms[r], at, part);
        if (Status status = take(r, row_nbytes + place(r, rank_) * part, outputs[r] + at, count)) {
          return status;
        }
      }
    }
    return kDone;
  }

 private:
  static constexpr size_t kBufferOfRank = 128 << 10, kLeastBuffer = 256 << 10,
                          kMostBuffer = 1 << 20, kSmall = 16 << 10;

  struct Record {
    Word step;
    Word tag;
  };
  struct alignas(kLine) Head {
    Record records[2];  // of the last two steps
    Word sleepers;
  };

  Head& head(int rank) { return *reinterpret_cast<Head*>(base_ + rank * (kPage + 2 * room_)); }
  uint8_t* buffer(int rank) {
    return base_ + rank * (kPage + 2 * room_) + kPage + (step_ & 1) * room_;
  }

  // A buffer has room for so much to each other rank behind a row, in whole lines.
  size_t part_nbytes(size_t row_nbytes) const {
    return (room_ - row_nbytes) / (size_ - 1) / kLine * kLine;
  }
  static int place(int writer, int reader) { return reader - (reader > writer ? 1 : 0); }
  static size_t left(size_t size, size_t at, size_t most) {
    return size > at ? std::min(size - at, most) : 0;
  }

  // The next step: waits until its buffer is free. All have made the call of the step before.
  Status begin() {
    if (Status status = await_all()) return status;
    ++step_;
    return kDone;
  }

  void put(size_t at, const uint8_t* data, size_t nbytes) {
    if (nbytes > 0) std::memcpy(buffer(rank_) + at, data, nbytes);
  }

  void publish() {
    segment_.note_core();
    Head& mine = head(rank_);
    Record& record = mine.records[step_ & 1];
    tag_of_step_ = tag_;
    record.tag.store(tag_, std::memory_order_relaxed);
    // Either this sees who sleeps, or who is about to sees the step.
    record.step.store(step_, std::memory_order_seq_cst);
    if (mine.sleepers.load(std::memory_order_seq_cst) != 0) wake(record.step);
  }

  Status take(int rank, size_t at, uint8_t* place, size_t nbytes) {
    if (nbytes == 0) return kDone;
    if (Status status = await(rank)) return status;
    std::memcpy(place, buffer(rank) + at, nbytes);
    return kDone;
  }

  Status await_all() {
    for (int i = 1; i < size_; ++i) {
      if (Status status = await((rank_ + i) % size_)) return status;
    }
    return kDone;
  }

  // Until a rank has published this rank's step, for the same call.
  Status await(int rank) {
    Head& theirs = head(rank);
    Record& record = theirs.records[step_ & 1];
    const auto is_there = [&] {
      return record.step.load(std::memory_order_acquire) == step_ &&
             record.tag.load(std::memory_order_relaxed) == tag_of_step_;
    };
    Word& closed = segment_.place(world_ranks_[rank]).closed;
    const auto sleep = [&] {
      const bool is_closed = closed.load(std::memory_order_acquire) != 0;
      if (is_there()) return kDone;
      if (is_closed || segment_.is_aborted()) return kLost;
      if (Clock::now() >= outcome_->deadline) return kLate;
      theirs.sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = record.step.load(std::memory_order_seq_cst);
      if (!is_there()) sleep_while(record.step, seen);
      theirs.sleepers.fetch_sub(1, std::memory_order_relaxed);
      return kDone;
    };
    outcome_->peer = rank;
    return segment_.wait(world_ranks_[rank], is_there, sleep);
  }

  // All ranks send the whole, and each reduces it: one step.
  Status reduce_whole(uint8_t* data, size_t count, size_t itemsize, DType dtype, Reduction how) {
    if (Status status = begin()) return status;
    put(0, data, count * itemsize);
    publish();
    if (Status status = await_all()) return status;
    for (int r = 0; r < size_; ++r) parts_[r] = r == rank_ ? data : buffer(r);
    reduce(data, parts_.data(), size_, count, dtype, how);
    return kDone;
  }

  // Each rank reduces a part, and hands it out: two steps.
  Status reduce_parts(uint8_t* data, size_t count, size_t itemsize, DType dtype, Reduction how) {
    const size_t part = part_nbytes(0);
    const auto start = [&](int r) { return count * r / size_ * itemsize; };
    if (Status status = begin()) return status;
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) put(place(rank_, r) * part, data + start(r), start(r + 1) - start(r));
    }
    publish();
    if (Status status = await_all()) return status;
    uint8_t* mine = data + start(rank_);
    const size_t nbytes = start(rank_ + 1) - start(rank_);
    for (int r = 0; r < size_; ++r) {
      parts_[r] = r == rank_ ? mine : buffer(r) + place(r, rank_) * part;
    }
    reduce(mine, parts_.data(), size_, nbytes / itemsize, dtype, how);
    if (Status status = begin()) return status;
    put(0, mine, nbytes);
    publish();
    for (int i = 1; i < size_; ++i) {
      const int r = (rank_ + i) % size_;
      if (Status status = take(r, 0, data + start(r), start(r + 1) - start(r))) return status;
    }
    return kDone;
  }

  // `most`: bytes of the largest part of any pair, alike on all ranks.
  Status compare_sizes(const int64_t* rooms, size_t& most) {
    if (Status status = await_all()) return status;
    for (int r = 0; r < size_; ++r) {
      const auto* row = reinterpret_cast<const int64_t*>(buffer(r));
      most = std::max<size_t>(most, *std::max_element(row, row + size_));
      if (row[rank_] != rooms[r]) {
        outcome_->peer = r;
        outcome_->nbytes = row[rank_];
        return kWrong;
      }
    }
    return kDone;
  }

  Segment& segment_;
  const std::vector<int> world_ranks_;
  const int rank_, size_;
  const size_t room_, region_nbytes_;
  uint8_t* const base_;
  std::vector<const void*> parts_;

  std::mutex lock_;
  std::condition_variable turned_;
  uint64_t turn_ = 0;
  bool has_failed_ = false;

  // Of the thread whose turn it is.
  uint32_t step_ = 0, tag_ = 0, tag_of_step_ = 0;
  Outcome* outcome_ = nullptr;
};

}  // namespace anychip::comm
