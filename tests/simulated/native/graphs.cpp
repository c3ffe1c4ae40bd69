// Memory of a pool is never given back while a graph of it is there, as what is recorded has addresses in it. Within it
// what is free is used again, as torch's allocator does while it captures: so two values may have one address, and the
// checker sees who writes there while another stream still reads. When a graph is replayed, nothing is allocated.
#include "graphs.h"

#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

namespace simulated {
namespace {

struct Place {
  void* begin;
  size_t bytes;
  bool taken;
};

struct Pool {
  std::deque<Place> places;
  int uses = 0;  // graphs, and threads that allocate from it
};

struct Graph {
  int64_t pool;
  std::vector<Kernel> kernels;
};

std::mutex mutex;
std::map<int64_t, Pool>& pools = *new std::map<int64_t, Pool>;
std::map<void*, Place*>& places = *new std::map<void*, Place*>;
std::map<int64_t, Graph>& graphs = *new std::map<int64_t, Graph>;
thread_local int64_t pool_of_thread = 0;
thread_local Graph* capturing = nullptr;
// What was in the pool when the capture began: a GPU runs nothing until the graph is replayed.
thread_local std::vector<std::pair<void*, std::vector<char>>> before;

void leave(int64_t number) {
  std::vector<void*> unused;
  {
    std::lock_guard<std::mutex> guard(mutex);
    Pool& pool = pools[number];
    if (--pool.uses || std::any_of(pool.places.begin(), pool.places.end(), [](auto& place) { return place.taken; }))
      return;
    for (Place& place : pool.places) {
      places.erase(place.begin);
      unused.push_back(place.begin);
    }
    pools.erase(number);
  }
  for (void* pointer : unused) give_segment(pointer);
}

}  // namespace

bool captures() {
  return capturing != nullptr;
}

void capture(Kernel kernel) {
  capturing->kernels.push_back(std::move(kernel));
}

void* take_from_pool(size_t bytes) {
  if (!pool_of_thread) return nullptr;
  std::lock_guard<std::mutex> guard(mutex);
  Pool& pool = pools[pool_of_thread];
  Place* best = nullptr;
  for (Place& place : pool.places)
    if (!place.taken && place.bytes >= bytes && (!best || place.bytes < best->bytes)) best = &place;
  if (!best) {
    pool.places.push_back({take_segment(bytes), bytes, true});
    best = &pool.places.back();
    places[best->begin] = best;
  }
  best->taken = true;
  return best->begin;
}

bool give_to_pool(void* pointer) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = places.find(pointer);
  if (found == places.end()) return false;
  found->second->taken = false;
  return true;
}

}  // namespace simulated

using namespace simulated;

extern "C" {

void simulated_pool_begin(int64_t pool) {
  std::lock_guard<std::mutex> guard(mutex);
  ++pools[pool].uses;
  pool_of_thread = pool;
}

void simulated_pool_end() {
  pool_of_thread = 0;
}

void simulated_pool_release(int64_t pool) {
  leave(pool);
}

void simulated_capture_begin(int64_t graph, int64_t pool) {
  simulated_pool_begin(pool);
  std::lock_guard<std::mutex> guard(mutex);
  for (Place& place : pools[pool].places) {
    char* begin = static_cast<char*>(place.begin);
    before.emplace_back(begin, std::vector<char>(begin, begin + place.bytes));
  }
  capturing = &(graphs[graph] = {pool, {}});
}

void simulated_capture_end() {
  for (auto& [begin, bytes] : before) std::memcpy(begin, bytes.data(), bytes.size());
  before.clear();
  capturing = nullptr;
  pool_of_thread = 0;
}

// One launch, of all that was captured.
void simulated_replay(int64_t number) {
  Graph& graph = graphs.at(number);
  std::vector<Access> accesses;
  for (Kernel& kernel : graph.kernels) {
    accesses.insert(accesses.end(), kernel.accesses.begin(), kernel.accesses.end());
    Quiet silence;
    kernel.body();
  }
  launched("a CUDA graph", stream_now(), accesses);
}

void simulated_graph_reset(int64_t number) {
  int64_t pool;
  {
    std::lock_guard<std::mutex> guard(mutex);
    auto found = graphs.find(number);
    if (found == graphs.end()) return;
    pool = found->second.pool;
    graphs.erase(found);
  }
  leave(pool);
}

// The addresses that are taken in a pool; gives how many there are.
int64_t simulated_pool_taken(int64_t pool, int64_t* addresses, int64_t room) {
  std::lock_guard<std::mutex> guard(mutex);
  int64_t count = 0;
  for (Place& place : pools[pool].places) {
    if (!place.taken) continue;
    if (count < room) addresses[count] = reinterpret_cast<int64_t>(place.begin);
    ++count;
  }
  return count;
}

// Lets exactly these be taken, and the storages own what they lie in.
void simulated_pool_restore(int64_t pool, const int64_t* addresses, int64_t count, const int64_t* storages, int64_t owners) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    for (Place& place : pools[pool].places)
      place.taken = std::count(addresses, addresses + count, reinterpret_cast<int64_t>(place.begin)) > 0;
  }
  c10::Device device(c10::DeviceType::CUDA, 0);
  for (int64_t index = 0; index < owners; ++index) {
    auto* storage = reinterpret_cast<c10::StorageImpl*>(storages[index]);
    if (storage->data_ptr().get_deleter() == &free_device) continue;  // several values have one
    void* data = const_cast<void*>(storage->data());
    storage->set_data_ptr_noswap(c10::DataPtr(data, data, &free_device, device));
  }
}

bool simulated_storage_owns(int64_t storage) {
  return reinterpret_cast<c10::StorageImpl*>(storage)->data_ptr().get_deleter() == &free_device;
}

void simulated_storage_free(int64_t number) {
  auto* storage = reinterpret_cast<c10::StorageImpl*>(number);
  if (storage->mutable_data_ptr().compare_exchange_deleter(&free_device, &c10::detail::deleteNothing))
    free_device(const_cast<void*>(storage->data()));
}

void simulated_storage_forbid(int64_t storage, const char* message) {
  reinterpret_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

void simulated_free(int64_t pointer) {
  free_device(reinterpret_cast<void*>(pointer));
}
}
