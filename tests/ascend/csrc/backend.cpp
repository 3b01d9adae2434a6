// A device "npu" on host memory, for machines without one: it computes, and it refuses what a card would not survive.
//
// Registered are the few kernels that make tensors, views and copies; everything else goes through the fallback.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_and_resize_ops.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "control.h"
#include "fallback.h"

namespace fake {
namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice0; }
  c10::Device getDevice() const override { return kDevice0; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one device, npu:0, not ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(kDefaultStream); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(set_stream(next.id())); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& one) const override {
    host_knows(clock_to_wait_for(one.id(), "a synchronisation of a stream"));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    host_knows(clock_to_wait_for(-1, "a synchronisation of the device"));
  }

 private:
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice0, id); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice0; }
};

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const c10::OperatorHandle& copy_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  return op;
}

// Between host and device, in either direction.
void copy_over(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto& ours = is_ours(from) ? from : to;
  const auto& host = is_ours(from) ? to : from;
  const bool is_late = non_blocking && PinnedAllocator::is_pinned(host.const_data_ptr());
  Clock before, after;
  Use work;
  {
    Lock lock(mutex());
    refuse_in_capture("a copy between host and device");
    before = clock_of(current_stream());
    work = {current_stream(), tick()};
    touch(*block_of(ours), is_ours(to), work.tick, "a copy between host and device");
    after = clock_of(current_stream());
  }
  arrive(before);
  const auto alias = alias_of(ours);
  if (!is_late) {
    (is_ours(from) ? host : alias).copy_(is_ours(from) ? alias : host);
    host_knows(after);
    return;
  }
  LateCopy copy{work, {}, {}, is_ours(from)};
  if (copy.is_to_host) {
    copy.source = alias.clone();
    copy.target = host;
    if (!state().flags.late) {
      host.copy_(alias);
      return;
    }
    if (host.is_contiguous()) std::memset(host.mutable_data_ptr(), 0xFF, host.nbytes());
  } else {
    alias.copy_(host);
    if (!state().flags.late) return;
    copy.source = host;
    copy.target = host.clone(at::MemoryFormat::Contiguous);
  }
  Lock lock(mutex());
  late_copies().push_back(std::move(copy));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0 && to.numel() == 0) return to;
  if (is_ours(from) && is_ours(to)) {
    torch::jit::Stack stack{to, from, non_blocking};
    fallback(copy_op(), &stack);
  } else {
    copy_over(from, to, non_blocking);
  }
  return to;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::resize_", "");
  torch::jit::Stack stack{self, C10_AS_INTARRAYREF_SLOW(size), format};
  fallback(op, &stack);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& self) {
  Clock clock;
  {
    Lock lock(mutex());
    refuse_in_capture("a read of a value by the host");
    touch(*block_of(self), false, tick(), "a read by the host");
    clock = clock_of(current_stream());
  }
  host_knows(clock);
  return alias_of(self).item();
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}

// The caller says that this stream uses the memory: it is not given out again before.
void record_stream(at::Tensor& self, c10::Stream stream) {
  Lock lock(mutex());
  auto& block = *block_of(self);
  const auto is_its = [&](const Use& use) { return use.stream == stream.id(); };
  block.reads.erase(std::remove_if(block.reads.begin(), block.reads.end(), is_its), block.reads.end());
  if (is_its(block.written)) block.written = {};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("record_stream", &record_stream);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
    return at::cpu::set_(self, std::move(source), 0, {count}, {});
  });
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

[[maybe_unused]] const bool is_registered = [] {
  c10::SetAllocator(kDevice, device_allocator());
  at::setHostAllocator(kDevice, pinned_allocator());
  c10::impl::registerDeviceGuard(kDevice, new Guard());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace fake
