// Graphs: calls with their arguments as they were at capture, run again at replay.
//
// A call is kept with aliases of the device memory it met and with its host arguments by value. Replay runs the CPU
// kernel again with exactly those and copies what it returns into the memory that the capture gave to the result. A
// capture on a card executes nothing: so what a capture wrote into memory of others is put back at its end, and its own
// memory is filled with NaN.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>


#include "order.h"

namespace fake {

struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> args;
  std::vector<at::Tensor> outputs;  // flat, undefined where nothing is to be copied
};

struct Graph {
  bool is_captured = false;
  bool is_dispatching = false;  // auto_dispatch_capture
  PoolPtr pool;
  std::vector<Call> calls;
  std::vector<size_t> updatable;  // places of calls that `update` reaches
  std::vector<BlockPtr> own;
  std::map<Block*, std::pair<BlockPtr, bool>> others;  // memory of others, and whether it is written
  std::map<Block*, std::vector<char>> before;                // its content before the capture
  bool is_updated = false;                             // since the last replay
  Use replayed;
};

inline std::map<int64_t, std::shared_ptr<Graph>>& graphs() {
  static auto* instance = new std::map<int64_t, std::shared_ptr<Graph>>();
  return *instance;
}

inline std::shared_ptr<Graph> graph_of(int64_t id) {
  Lock lock(mutex());
  auto found = graphs().find(id);
  TORCH_CHECK(found != graphs().end(), "no graph ", id);
  return found->second;
}

inline BlockPtr new_block(
    int64_t id, int64_t bytes, const std::function<c10::intrusive_ptr<c10::StorageImpl>()>& memory) {
  if (id == 0) {
    claim(bytes, nullptr);
    return c10::make_intrusive<Block>(memory(), 0, nullptr);
  }
  auto graph = graph_of(id);
  claim(bytes, graph->pool.get());
  graph->own.push_back(c10::make_intrusive<Block>(memory(), id, graph->pool));
  return graph->own.back();
}

// Memory that the capture of this graph uses; before the call is done.
inline void keep(Graph& graph, int64_t id, Block& block, bool is_write) {
  if (block.graph == id) return;
  auto& kept = graph.others[&block];
  kept.first = BlockPtr::unsafe_reclaim_from_nonowning(&block);
  kept.second |= is_write;
  if (is_write && block.bytes > 0 && graph.before.count(&block) == 0) {
    const auto* data = static_cast<const char*>(block.cpu->data());
    graph.before[&block].assign(data, data + block.bytes);
  }
}

inline void undo_capture(Graph& graph) {
  for (auto& [block, content] : graph.before) {
    std::memcpy(block->cpu->mutable_data(), content.data(), content.size());
  }
  graph.before.clear();
  if (!state().flags.poison) return;
  for (auto& block : graph.own) {
    if (block->bytes > 0) std::memset(block->cpu->mutable_data(), 0xFF, block->bytes);
  }
}

inline void flatten(const c10::IValue& value, std::vector<at::Tensor>& into) {
  if (value.isTensor()) {
    into.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) into.push_back(tensor);
  }
}

inline void run_again(const Call& call) {
  torch::jit::Stack stack(call.args.begin(), call.args.end());
  call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  std::vector<at::Tensor> results;
  for (const auto& value : stack) flatten(value, results);
  TORCH_CHECK(results.size() == call.outputs.size(), call.op.operator_name(), ": other outputs at replay");
  for (size_t i = 0; i < results.size(); ++i) {
    const auto& kept = call.outputs[i];
    if (!kept.defined()) continue;
    if (kept.sizes() != results[i].sizes()) {
      broken(c10::toString(call.op.operator_name()) + ": another shape at replay than at capture");
    }
    kept.copy_(results[i]);
  }
}

inline void replay(int64_t id) {
  auto graph = graph_of(id);
  {
    Lock lock(mutex());
    if (state().capture) refuse_in_capture("a replay");
    if (!graph->is_captured) broken("replay of a graph that holds no capture, or was reset");
    if (current_stream() == kDefaultStream) broken("replay on the default stream");
    if (!graph->updatable.empty() && !graph->is_updated) {
      broken("replay without update since the last one: the graph waits for an event of the update, forever");
    }
    if (state().flags.order && !is_behind(graph->pool->replayed)) {
      broken("replay on " + name_of(current_stream()) + " while a graph of the same pool may still run on " +
             name_of(graph->pool->replayed.stream));
    }
    for (const auto& [block, kept] : graph->others) {
      if (!block->is_live) broken("replay of a graph that uses memory which was freed since its capture");
    }
    graph->is_updated = false;
    const auto now = tick();
    graph->replayed = graph->pool->replayed = {current_stream(), now};
    for (const auto& [block, kept] : graph->others) touch(*block, kept.second, now, "a replay");
    for (const auto& block : graph->own) touch(*block, true, now, "a replay");
  }
  // As the aliases were made in it or out of it, and in-place work on the ones made in it is legal only there.
  c10::InferenceMode inference(true);
  for (const auto& call : graph->calls) run_again(call);
}

// Sets a host argument of the place-th updatable call, where that call was captured with it. False: it has none so named.
inline bool update(int64_t id, int64_t place, const std::string& name, c10::IValue value) {
  auto graph = graph_of(id);
  auto& call = graph->calls.at(graph->updatable.at(static_cast<size_t>(place)));
  const auto index = call.op.schema().argumentIndexWithName(name);
  if (!index) return false;
  auto& argument = call.args[static_cast<size_t>(*index)];
  TORCH_CHECK(!argument.isTensor(), "update of ", name, ": only host arguments can be updated");
  if (!argument.isNone()) argument = std::move(value);
  return true;
}

inline void begin_update(int64_t id) {
  auto graph = graph_of(id);
  Lock lock(mutex());
  if (state().capture) refuse_in_capture("an update");
  if (!graph->is_captured) broken("update of a graph that holds no capture, or was reset");
  if (graph->replayed.tick > at(state().host, graph->replayed.stream)) {
    broken("update of a graph whose last replay the host has not waited for");
  }
  graph->is_updated = true;
}

inline int64_t new_graph() {
  Lock lock(mutex());
  static int64_t next = 1;
  graphs()[next] = std::make_shared<Graph>();
  return next++;
}

inline void begin_capture(int64_t id, int64_t pool, const std::string& mode, bool is_dispatching) {
  auto graph = graph_of(id);
  Lock lock(mutex());
  if (state().capture) refuse_in_capture("another capture");
  if (current_stream() == kDefaultStream) broken("a capture on the default stream");
  if (graph->is_captured) broken("a capture into a graph that holds one: reset it first");
  TORCH_CHECK(mode == "global" || mode == "thread_local" || mode == "relaxed", "capture_error_mode ", mode);
  static auto* pools = new std::map<int64_t, std::weak_ptr<Pool>>();
  graph->pool = (*pools)[pool].lock();
  if (!graph->pool) (*pools)[pool] = graph->pool = std::make_shared<Pool>();
  graph->is_dispatching = is_dispatching;
  state().capture.reset(new Capture{id, current_stream(), std::this_thread::get_id(), mode, ""});
}

inline void drop(int64_t id) {
  Graph old;  // freed without the lock
  auto graph = graph_of(id);
  std::swap(*graph, old);
}

inline void end_capture(int64_t id, bool is_aborted) {
  auto graph = graph_of(id);
  std::string why;
  {
    Lock lock(mutex());
    auto& capture = state().capture;
    if (!capture || capture->graph != id) broken("the end of a capture that is not under way");
    if (!is_capturing_here()) broken("the end of a capture by another thread than its own");
    if (current_stream() != capture->stream) broken("the end of a capture on another stream than its own");
    why = capture->broken;
    capture.reset();
  }
  undo_capture(*graph);
  graph->is_captured = true;
  if (is_aborted || !why.empty()) drop(id);
  if (!is_aborted && !why.empty()) broken("the capture is broken: " + why);
}

}  // namespace fake
