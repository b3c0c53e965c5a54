// Messages between pairs of ranks, matched by tag and, among those of one tag, by order.
//
// A channel per ordered pair: cells that say what is sent, taken or granted, and bytes. A message
// of up to kInline bytes travels in its cell. A larger one waits until its receiver has a place for
// it and grants it; then its bytes stream. Bytes have no header: messages come in the order of the
// grants. Whoever waits moves what he finds for all messages of his process.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "segment.h"

namespace anychip::comm {

struct Message {
  bool is_send;
  int peer;
  uint32_t tag;
  uint8_t* data;
  uint64_t nbytes;
  uint64_t moved = 0;
  bool is_done = false;
};

class PointToPoint {
 public:
  explicit PointToPoint(Segment& segment) : segment_(segment), peers_(segment.world_size()) {
    for (int r = 0; r < segment.world_size(); ++r) {
      peers_[r].out = channel(segment.rank(), r);
      peers_[r].in = channel(r, segment.rank());
    }
  }

  static size_t channels_nbytes(int world_size) {
    return sizeof(Channel) * world_size * world_size;
  }

  // One end of a message; its memory is used until it has been waited for.
  Message* post(bool is_send, int peer, uint32_t tag, uint8_t* data, uint64_t nbytes) {
    std::lock_guard<std::mutex> guard(lock_);
    auto owner = std::make_unique<Message>(Message{is_send, peer, tag, data, nbytes});
    Message* message = owner.get();
    messages_[message] = std::move(owner);
    if (is_send) {
      send(*message);
    } else {
      receive(*message);
    }
    serve(peer);
    return message;
  }

  // After a failure nothing is moved any more, so that memory of other messages may go.
  Status wait(Message* message, Clock::time_point deadline) {
    Place& mine = segment_.place(segment_.rank());
    const int peer = message->peer;
    Place& theirs = segment_.place(peer);
    for (;;) {
      const uint32_t heard = mine.bell.load(std::memory_order_acquire);
      const bool is_closed = theirs.closed.load(std::memory_order_acquire) != 0;
      {
        std::lock_guard<std::mutex> guard(lock_);
        bool is_moving = false;
        for (int r = 0; r < segment_.world_size(); ++r) is_moving = serve(r) || is_moving;
        const bool is_lost = segment_.is_aborted() || (is_closed && !is_moving);
        if (message->is_done || is_lost || Clock::now() >= deadline) {
          const Status status = message->is_done ? kDone : is_lost ? kLost : kLate;
          if (status != kDone) segment_.abort();
          messages_.erase(message);
          return status;
        }
        if (is_moving) continue;
      }
      const auto rings = [&] { return mine.bell.load(std::memory_order_acquire) != heard; };
      segment_.note_core();
      segment_.wait(peer, rings, [&] {
        mine.sleepers.fetch_add(1, std::memory_order_seq_cst);
        if (mine.bell.load(std::memory_order_seq_cst) == heard) sleep_while(mine.bell, heard);
        mine.sleepers.fetch_sub(1, std::memory_order_relaxed);
        // Who is woken, or has slept for a while, looks around.
        return rings() ? kDone : kLost;
      });
    }
  }

 private:
  static constexpr uint64_t kInline = 960, kCells = 64, kBytes = 256 << 10;
  enum Kind : uint32_t { kSend, kTaken, kGranted };

  struct Cell {
    uint32_t kind;
    uint32_t tag;
    uint64_t id;  // of a message, counted by its sender
    uint64_t nbytes;
    uint8_t content[kInline];
  };
  struct Channel {
    alignas(kLine) std::atomic<uint64_t> cells_written;
    alignas(kLine) std::atomic<uint64_t> cells_read;
    alignas(kLine) std::atomic<uint64_t> bytes_written;
    alignas(kLine) std::atomic<uint64_t> bytes_read;
    alignas(kLine) Cell cells[kCells];
    alignas(kPage) uint8_t bytes[kBytes];
  };
  // What was sent and is not expected yet.
  struct Letter {
    uint64_t id, nbytes;
    std::vector<uint8_t> content;
  };
  struct Peer {
    Channel *out, *in;
    std::deque<Cell> unwritten;
    std::deque<Message*> sending, receiving;  // granted, in that order
    std::unordered_map<uint32_t, std::deque<Message*>> posted;
    std::unordered_map<uint32_t, std::deque<Letter>> letters;
    std::unordered_map<uint64_t, Message*> unanswered;
    uint64_t last_id = 0;
  };

  Channel* channel(int source, int destination) {
    auto* all = reinterpret_cast<Channel*>(segment_.channels());
    return all + source * segment_.world_size() + destination;
  }

  // The rest is called with the lock held.

  void send(Message& message) {
    Peer& peer = peers_[message.peer];
    Cell cell = {kSend, message.tag, ++peer.last_id, message.nbytes, {}};
    if (message.nbytes <= kInline) std::memcpy(cell.content, message.data, message.nbytes);
    peer.unanswered[cell.id] = &message;
    peer.unwritten.push_back(cell);
  }

  void receive(Message& message) {
    Peer& peer = peers_[message.peer];
    auto found = peer.letters.find(message.tag);
    if (found == peer.letters.end()) {
      peer.posted[message.tag].push_back(&message);
      return;
    }
    const Letter letter = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) peer.letters.erase(found);
    meet(peer, message, letter.id, letter.nbytes, letter.content.data());
  }

  void meet(Peer& peer, Message& message, uint64_t id, uint64_t nbytes, const uint8_t* content) {
    // Sizes differ only where calls are not compared.
    const uint64_t count = std::min(nbytes, message.nbytes);
    if (nbytes <= kInline) {
      std::memcpy(message.data, content, count);
      message.is_done = true;
    } else {
      message.nbytes = count;
      peer.receiving.push_back(&message);
    }
    peer.unwritten.push_back({nbytes <= kInline ? kTaken : kGranted, 0, id, count, {}});
  }

  // Moves some of what can be moved between this rank and another; true if there may be more.
  bool serve(int rank) {
    if (rank == segment_.rank() || segment_.is_aborted()) return false;
    Peer& peer = peers_[rank];
    bool is_news = read_cells(peer);
    bool is_moving = read_bytes(peer);
    is_news = write_cells(peer) || is_news;
    is_moving = write_bytes(peer) || is_moving;
    if (is_news || is_moving) ring(rank);
    return is_moving;
  }

  void ring(int rank) {
    Place& place = segment_.place(rank);
    place.bell.fetch_add(1, std::memory_order_seq_cst);
    if (place.sleepers.load(std::memory_order_seq_cst) != 0) wake(place.bell);
  }

  bool read_cells(Peer& peer) {
    const uint64_t end = peer.in->cells_written.load(std::memory_order_acquire);
    const uint64_t begin = peer.in->cells_read.load(std::memory_order_relaxed);
    for (uint64_t i = begin; i != end; ++i) take(peer, peer.in->cells[i % kCells]);
    peer.in->cells_read.store(end, std::memory_order_release);
    return end - begin >= kCells / 2;  // the other end may have waited for room
  }

  void take(Peer& peer, const Cell& cell) {
    if (cell.kind == kSend) {
      auto found = peer.posted.find(cell.tag);
      if (found == peer.posted.end()) {
        const uint64_t here = cell.nbytes <= kInline ? cell.nbytes : 0;
        peer.letters[cell.tag].push_back(
            {cell.id, cell.nbytes, std::vector<uint8_t>(cell.content, cell.content + here)});
        return;
      }
      Message* message = found->second.front();
      found->second.pop_front();
      if (found->second.empty()) peer.posted.erase(found);
      meet(peer, *message, cell.id, cell.nbytes, cell.content);
      return;
    }
    auto found = peer.unanswered.find(cell.id);
    if (found == peer.unanswered.end()) return;
    Message* message = found->second;
    peer.unanswered.erase(found);
    if (cell.kind == kTaken) {
      message->is_done = true;
    } else {
      message->nbytes = std::min(message->nbytes, cell.nbytes);
      peer.sending.push_back(message);
    }
  }

  bool write_cells(Peer& peer) {
    Channel& out = *peer.out;
    const uint64_t begin = out.cells_written.load(std::memory_order_relaxed);
    const uint64_t end = out.cells_read.load(std::memory_order_acquire) + kCells;
    uint64_t at = begin;
    for (; at != end && !peer.unwritten.empty(); ++at) {
      const Cell& cell = peer.unwritten.front();
      const uint64_t here = cell.kind == kSend && cell.nbytes <= kInline ? cell.nbytes : 0;
      std::memcpy(&out.cells[at % kCells], &cell, offsetof(Cell, content) + here);
      peer.unwritten.pop_front();
    }
    out.cells_written.store(at, std::memory_order_release);
    return at != begin;
  }

  // Copies between messages and a ring, a part of it, so that both ends copy at once.
  template <class Copy>
  static uint64_t stream(std::deque<Message*>& messages, uint64_t at, uint64_t end, Copy copy) {
    end = std::min(end, at + kBytes / 4);
    while (at != end && !messages.empty()) {
      Message& message = *messages.front();
      const uint64_t place = at % kBytes;
      const uint64_t count = std::min({end - at, kBytes - place, message.nbytes - message.moved});
      copy(message.data + message.moved, place, count);
      at += count;
      message.moved += count;
      if (message.moved == message.nbytes) {
        message.is_done = true;
        messages.pop_front();
      }
    }
    return at;
  }

  bool read_bytes(Peer& peer) {
    Channel& in = *peer.in;
    const uint64_t begin = in.bytes_read.load(std::memory_order_relaxed);
    const uint64_t end = in.bytes_written.load(std::memory_order_acquire);
    const uint64_t at =
        stream(peer.receiving, begin, end, [&](uint8_t* data, uint64_t place, uint64_t count) {
          std::memcpy(data, in.bytes + place, count);
        });
    in.bytes_read.store(at, std::memory_order_release);
    return at != begin;
  }

  bool write_bytes(Peer& peer) {
    Channel& out = *peer.out;
    const uint64_t begin = out.bytes_written.load(std::memory_order_relaxed);
    const uint64_t end = out.bytes_read.load(std::memory_order_acquire) + kBytes;
    const uint64_t at =
        stream(peer.sending, begin, end, [&](uint8_t* data, uint64_t place, uint64_t count) {
          std::memcpy(out.bytes + place, data, count);
        });
    out.bytes_written.store(at, std::memory_order_release);
    return at != begin;
  }

  Segment& segment_;
  std::mutex lock_;
  std::vector<Peer> peers_;
  std::unordered_map<Message*, std::unique_ptr<Message>> messages_;
};

}  // namespace anychip::comm
