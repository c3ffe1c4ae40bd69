// What the simulated device tells of: one event for each thing that a GPU, its allocators or the host did.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <vector>

namespace simulated {

enum Kind : int32_t {
  LAUNCH = 0,       // a kernel on `stream`, with its accesses
  RECORD = 1,       // event `id` at this point of `stream`
  BLOCK = 2,        // `stream` waits for event `id`
  SYNC_STREAM = 3,  // the host waits for all of `stream`; `name` says why
  SYNC_EVENT = 4,   // the host waits for event `id`
  SYNC_DEVICE = 5,  // the host waits for all streams
  ALLOCATE = 6,     // `bytes` of device memory at `id`, for `stream`
  FREE = 7,         // device memory at `id` goes back to the allocator
  KEEP = 8,         // memory at `id` is not used again before what `stream` has been given so far (record_stream)
  PIN = 9,          // `bytes` of pinned memory at `id`
  UNPIN = 10,       // pinned memory at `id` goes back
  HOST = 11,        // the host reads or writes pinned memory, with its accesses
  SEEN = 12,        // the host has asked for event `id`, and has been told that it is done
};

struct Access {
  uint64_t begin, end;
  int32_t writes;
};

struct Event {
  int32_t kind;
  int64_t stream, id, bytes;
  const char* name;
  int64_t count;
  const Access* accesses;
};

using Listener = void (*)(const Event*);

void tell(const Event& event);
void launched(const char* name, int64_t stream, const std::vector<Access>& accesses);

// Adds what a kernel touches of `tensor`: from its first element to its last. Nothing of pageable host memory.
void touch(std::vector<Access>& accesses, const at::Tensor& tensor, bool writes);

// `tensor`'s memory as the host sees it.
at::Tensor on_host(const at::Tensor& tensor);

// Inside, nothing but allocations is told: the host does what a kernel is meant to do.
struct Quiet {
  Quiet();
  ~Quiet();
};

}  // namespace simulated
