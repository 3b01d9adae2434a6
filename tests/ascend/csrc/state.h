// What the whole device knows: streams and their order, the capture under way, memory in use.
//
// Work is done at once, so nothing is ever late here. What a card would still be doing is kept as clocks: every piece
// of work on a stream has a tick, an event holds for every stream the tick up to which it comes behind, and the host
// knows the ticks that it has waited for. Whatever uses a result without that knowledge breaks a rule.
#pragma once
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fake {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int64_t kDefaultStream = 0;
inline const c10::Device kDevice0{kDevice, 0};

// Reaches Python as torch.AcceleratorError, which nothing on a CPU raises otherwise.
[[noreturn]] inline void broken(const std::string& what) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "RuleBroken: " + what);
}

using Clock = std::vector<int64_t>;  // by stream: everything up to this tick

inline int64_t at(const Clock& clock, int64_t stream) {
  return stream < static_cast<int64_t>(clock.size()) ? clock[stream] : 0;
}

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

struct Event {
  Clock clock;
  bool is_recorded = false;
  bool is_timing = false;
  int64_t graph = 0;  // the graph during whose capture it was recorded
  double seconds = 0;
};

struct Capture {
  int64_t graph;
  int64_t stream;
  std::thread::id thread;
  std::string mode;
  std::string broken;  // why it cannot end well, empty while it can
};

struct Flags {
  std::atomic<bool> order{true};   // streams must be ordered where they share memory
  std::atomic<bool> late{true};    // asynchronous copies arrive when the host has waited
  std::atomic<bool> poison{true};  // new memory is filled with NaN
};

// Never held while an op runs or a tensor is freed: both may need Python's lock.
inline std::mutex& mutex() {
  static std::mutex instance;
  return instance;
}
using Lock = std::lock_guard<std::mutex>;

struct State {
  std::vector<Clock> streams{Clock{0}};
  Clock host;
  std::map<int64_t, Event> events;
  std::unique_ptr<Capture> capture;
  std::string accusation;  // what a tensor's end broke, where nothing can be raised; the next work raises it
  int64_t next_event = 1;
  Flags flags;
};

inline State& state() {
  static auto* instance = new State();  // outlives tensors that the interpreter frees last
  return *instance;
}

inline int64_t& current_stream() {
  thread_local int64_t stream = kDefaultStream;
  return stream;
}

inline Clock& clock_of(int64_t stream) {
  auto& streams = state().streams;
  TORCH_CHECK(stream >= 0 && stream < static_cast<int64_t>(streams.size()), "no stream ", stream);
  auto& clock = streams[stream];
  if (static_cast<int64_t>(clock.size()) <= stream) clock.resize(stream + 1, 0);
  return clock;
}

inline std::string name_of(int64_t stream) {
  return stream == kDefaultStream ? "the default stream" : "stream " + std::to_string(stream);
}

inline bool is_capturing_here() {
  const auto& capture = state().capture;
  return capture && capture->thread == std::this_thread::get_id();
}

// Call with the lock held.
inline void raise_accusation() {
  if (state().accusation.empty()) return;
  broken(std::exchange(state().accusation, {}));
}

// What must not happen while a capture is under way, whoever does it. Call with the lock held.
inline void refuse_in_capture(const std::string& what) {
  auto& capture = state().capture;
  if (!capture) return;
  if (is_capturing_here()) {
    capture->broken = what + " during capture";
    broken(what + " during capture");
  }
  capture->broken = what + " by another thread during capture";
  broken(what + " while another thread captures, which breaks that capture");
}

// What only the capturing thread must not do, and no thread in the mode "global". Call with the lock held.
inline void refuse_where_unsafe(const std::string& what) {
  const auto& capture = state().capture;
  if (!capture || capture->mode == "relaxed") return;
  if (is_capturing_here() || capture->mode == "global") refuse_in_capture(what);
}

// Before work on the current stream: the graph that records it, 0 outside of a capture. Call with the lock held.
inline int64_t enter(const std::string& what) {
  raise_accusation();
  auto& capture = state().capture;
  if (!capture) return 0;
  const auto stream = current_stream();
  if (!is_capturing_here()) {
    if (stream == capture->stream) refuse_in_capture(what + " on the capturing stream");
    return 0;
  }
  if (stream != capture->stream) refuse_in_capture(what + " on " + name_of(stream));
  return capture->graph;
}

inline int64_t tick() {
  const auto stream = current_stream();
  return ++clock_of(stream)[stream];
}

}  // namespace fake
