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

// True while this thread captures: kernels go into a graph.
bool captures();
void capture(Kernel kernel);

// Memory of the pool that this thread allocates from; null if there is none.
void* take_from_pool(size_t bytes);
// Whether `pointer` is a pool's: it is free then.
bool give_to_pool(void* pointer);

// What device memory is taken from, and given back to, by pools.
void* take_segment(size_t bytes);
void give_segment(void* pointer);
void free_device(void* pointer);

int64_t stream_now();

}  // namespace simulated
