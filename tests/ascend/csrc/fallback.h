// Every op without a kernel of its own: the CPU's kernel on aliases of the device's memory.
#pragma once
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include "graph.h"

namespace fake {

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

inline at::Tensor alias_of(const at::Tensor& tensor) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(block_of(tensor)->cpu), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return alias;
}

inline at::Tensor on_device(const c10::Storage& storage, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return tensor;
}

struct Pair {
  at::Tensor device, cpu;
  bool is_written;
};

// One call of an op with device tensors.
class Run {
 public:
  Run(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), first_(stack.size() - schema_.arguments().size()) {}

  void operator()() {
    is_view_ = !schema_.returns().empty();
    for (const auto& one : schema_.returns()) {
      const auto* info = one.alias_info();
      is_view_ &= info != nullptr && !info->isWrite();
      reads_host_ |= !holds_tensors(*one.type());
    }
    for (size_t i = 0; i < schema_.arguments().size(); ++i) swap(i);
    if (!is_view_) prepare();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    for (auto& pair : pairs_) follow_resize(pair);
    const size_t count = schema_.returns().size();
    for (size_t i = stack_.size() - count; i < stack_.size(); ++i) wrap(stack_[i]);
    if (graph_ == nullptr) return;
    if (is_updatable()) graph_->updatable.push_back(graph_->calls.size());
    graph_->calls.push_back({op_, std::move(args_), std::move(outputs_)});
  }

 private:
  static bool holds_tensors(const c10::Type& type) {
    if (type.kind() == c10::TypeKind::TensorType) return true;
    if (type.kind() == c10::TypeKind::ListType || type.kind() == c10::TypeKind::OptionalType) {
      return holds_tensors(*type.containedType(0));
    }
    return false;
  }

  std::string name() const { return c10::toString(op_.operator_name()); }

  at::Tensor swap(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      TORCH_CHECK(
          tensor.device().is_cpu() && !is_written, "Expected all tensors to be on the same device, but found at least "
          "two devices, npu:0 and ", tensor.device(), "! (", name(), ")");
      host_.push_back(tensor);
      return tensor;
    }
    for (auto& pair : pairs_) {
      if (pair.device.is_same(tensor)) {
        pair.is_written |= is_written;
        return pair.cpu;
      }
    }
    pairs_.push_back({tensor, alias_of(tensor), is_written});
    return pairs_.back().cpu;
  }

  void swap(size_t place) {
    auto& value = stack_[first_ + place];
    const auto* info = schema_.arguments()[place].alias_info();
    const bool is_written = info != nullptr && info->isWrite();
    if (value.isTensor()) {
      value = swap(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(swap(tensor, is_written));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional(swap(*tensor, is_written)) : tensor);
      }
      value = std::move(list);
    } else if (value.isDevice()) {
      is_result_on_host_ |= value.toDevice().type() != kDevice;
      value = c10::Device(c10::DeviceType::CPU);
    } else {
      TORCH_CHECK(!value.isStorage(), name(), " takes a storage, which this device does not offer");
    }
  }

  // Rules, order and recording, before the kernel runs.
  void prepare() {
    check_host_tensors();
    Clock reached;
    {
      Lock lock(mutex());
      const auto id = enter(name());
      if (id != 0) {
        check_capturable();
        graph_id_ = id;
        graph_ = graphs().at(id).get();
        for (auto& pair : pairs_) keep(*graph_, id, *block_of(pair.device), pair.is_written);
        for (size_t i = first_; i < stack_.size(); ++i) args_.push_back(stack_[i]);
      } else {
        const auto now = tick();
        for (auto& pair : pairs_) touch(*block_of(pair.device), pair.is_written, now, name());
        if (reads_host_) reached = clock_of(current_stream());
      }
    }
    if (graph_ != nullptr) {
      for (auto& value : args_) {
        if (value.isTensor() && value.toTensor().defined() && is_host(value.toTensor())) {
          value = value.toTensor().clone();
        }
      }
    }
    if (!reached.empty()) host_knows(reached);
  }

  bool is_host(const at::Tensor& tensor) const {
    return std::any_of(host_.begin(), host_.end(), [&](const auto& one) { return one.is_same(tensor); });
  }

  bool is_updatable() const {
    return graph_->is_dispatching && schema_.name().rfind("npu::npu_fused_infer_attention_score", 0) == 0;
  }

  // Numbers may come as host tensors, and the places that an indexing op copies itself; nothing else.
  void check_host_tensors() {
    for (const auto& tensor : host_) {
      if (tensor.dim() == 0) continue;
      TORCH_CHECK(
          is_index(tensor),
          "Expected all tensors to be on the same device, but found at least two devices, npu:0 and cpu! (",
          name(), ")");
      Lock lock(mutex());
      refuse_in_capture("a copy from host memory (" + name() + ")");
    }
  }

  bool is_index(const at::Tensor& tensor) const {
    const auto& name = schema_.name();
    if (name != "aten::index" && name != "aten::index_put" && name != "aten::index_put_" &&
        name != "aten::_index_put_impl_") {
      return false;
    }
    const auto indices = stack_[first_ + 1].toOptionalTensorVector();
    return !is_host(stack_[first_].toTensor()) &&
           std::any_of(indices.begin(), indices.end(), [&](const auto& one) { return one && one->is_same(tensor); });
  }

  // Call with the lock held.
  void check_capturable() const {
    if (reads_host_) refuse_in_capture(name() + ", which reads a value on the host,");
    const auto& schema = schema_.name();
    if (schema == "aten::index" || schema == "aten::index_put_" || schema == "aten::_index_put_impl_" ||
        schema == "aten::index_put") {
      for (const std::optional<at::Tensor> index : stack_[first_ + 1].toOptionalTensorList()) {
        if (index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) {
          refuse_in_capture(name() + " with a mask, whose shape depends on data,");
        }
      }
    } else if (schema == "aten::repeat_interleave") {
      if (stack_.back().isNone()) refuse_in_capture(name() + " without output_size, which reads a length,");
    } else if (op_.hasTag(at::Tag::dynamic_output_shape)) {
      refuse_in_capture(name() + ", whose shape depends on data,");
    }
  }

  // An op may have given its out argument another shape, and with it other memory.
  void follow_resize(Pair& pair) {
    auto* impl = pair.device.unsafeGetTensorImpl();
    auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    auto* block = block_of(storage);
    if (block->cpu->data() != storage->data() || block->cpu->nbytes() != storage->nbytes()) {
      if (graph_ != nullptr && block->graph != graph_id_) {
        Lock lock(mutex());
        refuse_in_capture(name() + " gives new memory to an existing tensor");
      }
      block->resized();
      auto old = storage->set_data_ptr({block->cpu->mutable_data(), block, &free_block, kDevice0});
      old.release_context();
      storage->set_nbytes(block->cpu->nbytes());
    }
    const auto& cpu = pair.cpu;
    if (cpu.sizes() != pair.device.sizes() || cpu.strides() != pair.device.strides() ||
        cpu.storage_offset() != pair.device.storage_offset()) {
      impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  at::Tensor wrap(const at::Tensor& result) {
    outputs_.emplace_back();
    if (!result.defined() || is_result_on_host_ || is_host(result)) return result;
    const auto& storage = result.storage();
    for (const auto& pair : pairs_) {
      if (pair.cpu.is_same(result)) return pair.device;
    }
    for (const auto& pair : pairs_) {
      if (pair.cpu.storage().is_alias_of(storage)) return on_device(pair.device.storage(), result);
    }
    TORCH_CHECK(result.device().is_cpu() && result.layout() == at::kStrided, name(), " returns no plain tensor");
    c10::intrusive_ptr<c10::StorageImpl> memory = storage.getWeakStorageImpl().lock();
    auto block = new_block(graph_id_, static_cast<int64_t>(memory->nbytes()), [&] { return memory; });
    if (graph_ != nullptr) outputs_.back() = result;
    {
      Lock lock(mutex());
      block->written = {current_stream(), at_now()};
    }
    return on_device(storage_of(std::move(block)), result);
  }

  static int64_t at_now() { return clock_of(current_stream())[current_stream()]; }

  void wrap(c10::IValue& value) {
    if (value.isTensor()) {
      value = wrap(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(wrap(tensor));
      value = std::move(list);
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  size_t first_;
  bool is_view_ = false, reads_host_ = false, is_result_on_host_ = false;
  std::vector<Pair> pairs_;
  std::vector<at::Tensor> host_;
  Graph* graph_ = nullptr;
  int64_t graph_id_ = 0;
  std::vector<c10::IValue> args_;
  std::vector<at::Tensor> outputs_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Run(op, *stack)();
}

}  // namespace fake
