// What torch.npu does with streams, events, graphs and memory, as ops of their own.
#pragma once
#include <torch/library.h>

#include <chrono>

#include "graph.h"

namespace fake {

inline int64_t new_stream() {
  Lock lock(mutex());
  state().streams.emplace_back();
  return static_cast<int64_t>(state().streams.size()) - 1;
}

inline int64_t set_stream(int64_t stream) {
  Lock lock(mutex());
  clock_of(stream);
  return std::exchange(current_stream(), stream);
}

inline Event& event_of(int64_t id) {
  auto found = state().events.find(id);
  TORCH_CHECK(found != state().events.end(), "no event ", id);
  return found->second;
}

inline int64_t new_event(bool is_timing) {
  Lock lock(mutex());
  const auto id = state().next_event++;
  state().events[id].is_timing = is_timing;
  return id;
}

inline void free_event(int64_t id) {
  Lock lock(mutex());
  state().events.erase(id);
}

inline void record_event(int64_t id, int64_t stream) {
  Lock lock(mutex());
  auto& event = event_of(id);
  const auto& capture = state().capture;
  const bool is_in_graph = capture && stream == capture->stream;
  if (capture && is_capturing_here() && !is_in_graph) refuse_in_capture("an event on " + name_of(stream));
  if (is_in_graph && !is_capturing_here()) refuse_in_capture("an event on the capturing stream");
  if (is_in_graph && event.is_timing) refuse_in_capture("a timing event");
  event.graph = is_in_graph ? capture->graph : 0;
  event.is_recorded = true;
  event.clock = clock_of(stream);
  event.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void wait_event(int64_t stream, int64_t id) {
  Lock lock(mutex());
  const auto& event = event_of(id);
  if (!event.is_recorded) return;
  const auto& capture = state().capture;
  if (capture && stream == capture->stream) {
    if (!is_capturing_here()) refuse_in_capture("a wait on the capturing stream");
    if (event.graph != capture->graph) refuse_in_capture("a wait for an event from outside of the capture");
  } else if (event.graph != 0) {
    broken("a wait for an event that was recorded in a capture");
  }
  join(clock_of(stream), event.clock);
}

inline Clock clock_of_event(int64_t id, const char* what, bool is_query) {
  Lock lock(mutex());
  if (is_query) {
    refuse_where_unsafe(what);
  } else {
    refuse_in_capture(what);
  }
  const auto& event = event_of(id);
  if (event.graph != 0) broken(std::string(what) + " that was recorded in a capture");
  return event.clock;
}

inline double seconds_between(int64_t start, int64_t end) {
  Clock clock;
  {
    Lock lock(mutex());
    refuse_where_unsafe("a question for elapsed time");
    const auto &one = event_of(start), &two = event_of(end);
    TORCH_CHECK(one.is_timing && two.is_timing, "both events need enable_timing=True");
    TORCH_CHECK(one.is_recorded && two.is_recorded, "both events must have been recorded");
    for (int64_t stream = 0; stream < static_cast<int64_t>(two.clock.size()); ++stream) {
      if (state().flags.order && at(two.clock, stream) > at(state().host, stream)) {
        broken("a question for elapsed time before the host has waited for the event");
      }
    }
    return two.seconds - one.seconds;
  }
}

inline Clock clock_to_wait_for(int64_t stream, const char* what) {
  Lock lock(mutex());
  raise_accusation();
  refuse_in_capture(what);
  return stream < 0 ? everything() : clock_of(stream);
}

inline void set_flag(const std::string& name, bool value) {
  auto& flags = state().flags;
  if (name == "order") {
    flags.order = value;
  } else if (name == "late") {
    flags.late = value;
  } else if (name == "poison") {
    flags.poison = value;
  } else {
    TORCH_CHECK(false, "unknown flag ", name, "; there are order, late, poison");
  }
}

inline std::vector<int64_t> memory_numbers() {
  Lock lock(memory_mutex());
  const auto& count = memory_count();
  return {count.used, count.peak_used, count.reserved, count.peak_reserved, count.limit};
}

inline void reset_peak() {
  Lock lock(memory_mutex());
  auto& count = memory_count();
  count.peak_used = count.used;
  count.peak_reserved = count.reserved;
}

inline void set_limit(int64_t bytes) {
  Lock lock(memory_mutex());
  memory_count().limit = bytes;
}

inline std::vector<std::string> calls_of(int64_t graph) {
  std::vector<std::string> names;
  for (const auto& call : graph_of(graph)->calls) names.push_back(c10::toString(call.op.operator_name()));
  return names;
}

TORCH_LIBRARY(xgr_fake_npu, m) {
  m.def("new_stream() -> int", &new_stream);
  m.def("get_stream() -> int", [] { return current_stream(); });
  m.def("set_stream(int stream) -> int", &set_stream);
  m.def("wait_for(int stream) -> ()", [](int64_t stream) {
    host_knows(clock_to_wait_for(stream, stream < 0 ? "a synchronisation of the device" : "a synchronisation of a stream"));
  });
  m.def("query_stream(int stream) -> ()", [](int64_t stream) {
    Clock clock;
    {
      Lock lock(mutex());
      refuse_where_unsafe("a question to a stream");
      clock = clock_of(stream);
    }
    host_knows(clock);
  });
  m.def("raise_accusation() -> ()", [] {
    Lock lock(mutex());
    raise_accusation();
  });
  m.def("new_event(bool is_timing) -> int", &new_event);
  m.def("free_event(int event) -> ()", &free_event);
  m.def("record_event(int event, int stream) -> ()", &record_event);
  m.def("wait_event(int stream, int event) -> ()", &wait_event);
  m.def("query_event(int event) -> ()", [](int64_t event) {
    host_knows(clock_of_event(event, "a question to an event", true));
  });
  m.def("wait_for_event(int event) -> ()", [](int64_t event) {
    host_knows(clock_of_event(event, "a synchronisation with an event", false));
  });
  m.def("seconds_between(int start, int end) -> float", &seconds_between);

  m.def("new_graph() -> int", &new_graph);
  m.def("free_graph(int graph) -> ()", [](int64_t id) {
    drop(id);
    Lock lock(mutex());
    graphs().erase(id);
  });
  m.def("begin_capture(int graph, int pool, str mode, bool is_dispatching) -> ()", &begin_capture);
  m.def("end_capture(int graph, bool is_aborted) -> ()", &end_capture);
  m.def("is_capturing() -> bool", [] {
    Lock lock(mutex());
    return state().capture && state().capture->stream == current_stream();
  });
  m.def("replay(int graph) -> ()", &replay);
  m.def("reset(int graph) -> ()", &drop);
  m.def("begin_update(int graph) -> ()", &begin_update);
  m.def("num_updatable(int graph) -> int",
        [](int64_t graph) { return static_cast<int64_t>(graph_of(graph)->updatable.size()); });
  m.def("update(int graph, int place, str name, int[] value) -> bool",
        [](int64_t graph, int64_t place, const std::string& name, std::vector<int64_t> value) {
          return update(graph, place, name, c10::IValue(value));
        });
  m.def("calls_of(int graph) -> str[]", &calls_of);

  m.def("memory_numbers() -> int[]", &memory_numbers);
  m.def("reset_peak() -> ()", &reset_peak);
  m.def("set_limit(int bytes) -> ()", &set_limit);
  m.def("set_flag(str name, bool value) -> ()", &set_flag);
}

}  // namespace fake
