// Device memory: host memory that is counted, limited, and known to be alive or not.
//
// A block is the memory behind one device storage, and holds it as an ordinary CPU storage. So the CPU's kernels get
// device tensors as aliases, and what they return becomes device memory without a copy. A graph keeps what was
// allocated during its capture; a block of others that has died since is caught at replay (`is_live`).
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <cstring>
#include <functional>

#include "state.h"

namespace fake {

struct MemoryCount {
  int64_t used = 0, peak_used = 0, reserved = 0, peak_reserved = 0;
  int64_t limit = int64_t{64} << 30;
};

inline std::mutex& memory_mutex() {
  static std::mutex instance;
  return instance;
}

inline MemoryCount& memory_count() {
  static auto* instance = new MemoryCount();
  return *instance;
}

inline std::string in_mib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

struct Use {
  int64_t stream = 0, tick = 0;
};

// What graphs share: memory that one frees is used again by the next capture, so their most at any time is reserved.
// (Counted only. Here no address is given out twice, so that a graph which reads freed memory is caught.)
struct Pool {
  int64_t used = 0, reserved = 0;
  Use replayed;  // the last replay of any graph of the pool
  ~Pool() {
    Lock lock(memory_mutex());
    memory_count().reserved -= reserved;
  }
};
using PoolPtr = std::shared_ptr<Pool>;

// The class and the first words are those of torch_npu 2.13 (its allocator throws c10::OutOfMemoryError).
inline void claim(int64_t bytes, Pool* pool) {
  Lock lock(memory_mutex());
  auto& count = memory_count();
  const auto growth = pool == nullptr ? bytes : std::max<int64_t>(0, pool->used + bytes - pool->reserved);
  if (count.reserved + growth > count.limit) {
    throw c10::OutOfMemoryError(
        {__func__, __FILE__, __LINE__},
        "NPU out of memory. Tried to allocate " + in_mib(bytes) + " (NPU 0; " + in_mib(count.limit) +
            " total capacity; " + in_mib(count.used) + " already allocated; " +
            in_mib(count.limit - count.reserved) + " free; " + in_mib(count.reserved) +
            " reserved in total by PyTorch)");
  }
  if (pool != nullptr) {
    pool->used += bytes;
    pool->reserved += growth;
  }
  count.used += bytes;
  count.reserved += growth;
  count.peak_used = std::max(count.peak_used, count.used);
  count.peak_reserved = std::max(count.peak_reserved, count.reserved);
}

inline void give_back(int64_t bytes, Pool* pool) {
  Lock lock(memory_mutex());
  memory_count().used -= bytes;
  if (pool == nullptr) {
    memory_count().reserved -= bytes;
  } else {
    pool->used -= bytes;
  }
}

struct Block : c10::intrusive_ptr_target {
  // The bytes are claimed before.
  Block(c10::intrusive_ptr<c10::StorageImpl> memory, int64_t graph_id, PoolPtr of_graph)
      : cpu(std::move(memory)),
        bytes(static_cast<int64_t>(cpu->nbytes())),
        graph(graph_id),
        pool(std::move(of_graph)) {}

  // The device storage is gone; graphs may still hold the memory.
  void die();
  void resized() {
    const auto now = static_cast<int64_t>(cpu->nbytes());
    if (now > bytes) {
      claim(now - bytes, pool.get());
    } else {
      give_back(bytes - now, pool.get());
    }
    bytes = now;
  }

  c10::intrusive_ptr<c10::StorageImpl> cpu;
  int64_t bytes;
  int64_t graph;  // the graph during whose capture it was allocated, 0 if none
  PoolPtr pool;   // that graph's
  int64_t stream = current_stream();  // whose memory it is again once freed
  std::atomic<bool> is_live{true};
  Use written;             // the last write
  std::vector<Use> reads;  // since the last write, one a stream
};
using BlockPtr = c10::intrusive_ptr<Block>;

inline void free_block(void* context) {
  auto block = BlockPtr::reclaim(static_cast<Block*>(context));
  block->die();
}

inline c10::DataPtr data_of(BlockPtr block) {
  void* data = block->cpu->mutable_data();
  return {data, block.release(), &free_block, kDevice0};
}

// A block of that much memory, owned by the graph whose capture allocates it, if any.
BlockPtr new_block(int64_t graph, int64_t bytes, const std::function<c10::intrusive_ptr<c10::StorageImpl>()>& memory);

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    int64_t graph = 0;
    {
      Lock lock(mutex());
      graph = enter("an allocation");
      if (graph == 0) refuse_where_unsafe("an allocation");
    }
    return data_of(new_block(graph, static_cast<int64_t>(bytes), [bytes] {
      auto cpu = c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), bytes, c10::GetCPUAllocator(), true);
      if (bytes > 0 && state().flags.poison) std::memset(cpu->mutable_data(), 0xFF, bytes);
      return cpu;
    }));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

inline DeviceAllocator* device_allocator() {
  static auto* instance = new DeviceAllocator();
  return instance;
}

inline Block* block_of(const c10::StorageImpl* storage) {
  const auto& data = storage->data_ptr();
  TORCH_CHECK(data.get_deleter() == &free_block, "a storage on npu that this device did not make");
  return static_cast<Block*>(data.get_context());
}

inline Block* block_of(const at::Tensor& tensor) {
  return block_of(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

inline c10::Storage storage_of(BlockPtr block) {
  const auto bytes = static_cast<size_t>(block->bytes);
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, data_of(std::move(block)), device_allocator(), true);
}

// A host memory that the device may copy from and to on its own.
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    {
      Lock lock(mutex());
      refuse_where_unsafe("an allocation of pinned host memory");
    }
    auto* data = static_cast<char*>(::operator new(std::max<size_t>(bytes, 1), std::align_val_t{64}));
    Lock lock(memory_mutex());
    ranges()[data] = data + std::max<size_t>(bytes, 1);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static std::map<const char*, const char*>& ranges() {
    static auto* instance = new std::map<const char*, const char*>();
    return *instance;
  }
  static void release(void* data) {
    {
      Lock lock(memory_mutex());
      ranges().erase(static_cast<char*>(data));
    }
    ::operator delete(data, std::align_val_t{64});
  }
  static bool is_pinned(const void* data) {
    const auto* place = static_cast<const char*>(data);
    Lock lock(memory_mutex());
    auto after = ranges().upper_bound(place);
    return after != ranges().begin() && place < std::prev(after)->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

inline PinnedAllocator* pinned_allocator() {
  static auto* instance = new PinnedAllocator();
  return instance;
}

}  // namespace fake
