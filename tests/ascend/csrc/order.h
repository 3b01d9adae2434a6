// Order: which work comes behind which, and what the host may conclude.
//
// Host copies that need not be waited for are done late on purpose: the target holds NaN until the host has waited, and
// the source must still hold then what it held when the copy was issued.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <deque>

#include "memory.h"

namespace fake {

struct LateCopy {
  Use work;
  at::Tensor target, source;  // to the host: source is the content; from the host: target is what it was
  bool is_to_host;
};

inline std::deque<LateCopy>& late_copies() {
  static auto* instance = new std::deque<LateCopy>();
  return *instance;
}

// Ends the copies that `known` comes behind. Call without the lock.
inline void arrive(const Clock& known) {
  std::vector<LateCopy> due;
  {
    Lock lock(mutex());
    auto& all = late_copies();
    for (size_t i = 0; i < all.size();) {
      if (all[i].work.tick <= at(known, all[i].work.stream)) {
        due.push_back(std::move(all[i]));
        all.erase(all.begin() + static_cast<int64_t>(i));
      } else {
        ++i;
      }
    }
  }
  bool is_changed = false;
  for (auto& copy : due) {
    if (copy.is_to_host) {
      copy.target.copy_(copy.source);
    } else {
      const auto now = copy.source.contiguous();
      is_changed |= std::memcmp(now.const_data_ptr(), copy.target.const_data_ptr(), now.nbytes()) != 0;
    }
  }
  if (is_changed) broken("host memory was changed before the copy from it to the device had finished");
}

// The host has waited for everything that `clock` comes behind.
inline void host_knows(const Clock& clock) {
  Clock known;
  {
    Lock lock(mutex());
    join(state().host, clock);
    known = state().host;
  }
  arrive(known);
}

inline Clock everything() {
  Clock all;
  for (int64_t stream = 0; stream < static_cast<int64_t>(state().streams.size()); ++stream) {
    join(all, clock_of(stream));
  }
  return all;
}

inline bool is_behind(const Use& use, int64_t stream = current_stream()) {
  return use.tick <= at(clock_of(stream), use.stream) || use.tick <= at(state().host, use.stream);
}

// Freed memory goes to the next who allocates on the stream that it came from, at once.
inline void Block::die() {
  is_live = false;
  give_back(bytes, pool.get());
  if (graph != 0 || bytes == 0 || !state().flags.order) return;
  Lock lock(mutex());
  for (const auto& use : reads) {
    if (!is_behind(use, stream)) {
      state().accusation = "memory of " + name_of(stream) + " was freed while " + name_of(use.stream) +
                           " may still read it, and nothing orders the two";
    }
  }
  if (!is_behind(written, stream)) {
    state().accusation = "memory of " + name_of(stream) + " was freed while " + name_of(written.stream) +
                         " may still write it, and nothing orders the two";
  }
}

// One use of a block by the work of this tick. Call with the lock held.
inline void touch(Block& block, bool is_write, int64_t tick, const std::string& what) {
  const auto stream = current_stream();
  if (state().flags.order) {
    if (!is_behind(block.written)) {
      broken(what + " on " + name_of(stream) + " uses memory before " + name_of(block.written.stream) +
             " has written it: nothing orders the two streams");
    }
    if (is_write) {
      for (const auto& read : block.reads) {
        if (!is_behind(read)) {
          broken(what + " on " + name_of(stream) + " writes memory before " + name_of(read.stream) +
                 " has read it: nothing orders the two streams");
        }
      }
    }
  }
  if (is_write) {
    block.written = {stream, tick};
    block.reads.clear();
    return;
  }
  for (auto& read : block.reads) {
    if (read.stream == stream) {
      read.tick = tick;
      return;
    }
  }
  block.reads.push_back({stream, tick});
}

}  // namespace fake
