// CUDA graphs of the simulated device: kernels that are kept to be run again, and the memory pools that they run in.
#pragma once

#include "simulated.h"

#include <functional>
#include <string>
#include <vector>

namespace simulated {

// What one launch does, to the same memory each time.
struct Kernel {
  std::string name;
  std::vector<Access> accesses;
  std::function<void()> body;
};

// True while this thread's current stream is captured, as the one where the capture began or as one that has waited for
// an event of it: kernels go into the graph, and none runs.
bool captures();
void capture(Kernel kernel);
// Called for what a stream records and waits for; these are in the graph, too. An error where CUDA has one.
void captured_record(int64_t event, int64_t stream);
void captured_block(int64_t event, int64_t stream);
// An error if the host may not wait for, or ask about, an event or a stream (or, without one, everything) now.
void refuse_event(int64_t event);
void refuse_stream(int64_t stream);
void refuse_device();

// Memory of the pool that this thread allocates from; null if there is none.
void* take_from_pool(size_t bytes);
// Whether `pointer` is a pool's: it is free then.
bool give_to_pool(void* pointer);

// What device memory is taken from, and given back to, by pools.
void* take_segment(size_t bytes);
void give_segment(void* pointer);
void free_device(void* pointer);
// Another stream uses memory of a pool: within a capture, torch's allocator uses it for nothing else then.
void keep_in_pool(void* pointer);

// What is in device memory, and its return: a capture runs nothing.
using Contents = std::vector<std::pair<void*, std::vector<char>>>;
Contents contents();
void restore(const Contents& before);
uint64_t random_offset();
void set_random_offset(uint64_t offset);
int64_t new_stream();
int64_t new_event();

int64_t stream_now();

}  // namespace simulated
