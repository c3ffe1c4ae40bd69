// Memory of a pool is never given back while a graph of it is there, as what is recorded has addresses in it. Within it
// what is free is used again, as torch's allocator does while it captures: so two values may have one address, and the
// checker sees who writes there while another stream still reads. When a graph is replayed, nothing is allocated.
#include "graphs.h"

#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <atomic>
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
  int64_t stream;
  bool taken;
  bool kept = false;
};

struct Pool {
  std::deque<Place> places;
  int uses = 0;  // graphs, and threads that allocate from it
};

enum class Act { LAUNCH, RECORD, BLOCK };

struct Step {
  Act act;
  int64_t stream, event;
  Kernel kernel;
};

struct Graph {
  int64_t pool;
  std::vector<Step> steps;
  std::map<int64_t, int64_t> streams;  // by those of the capture: what stands for them in replays
};

using Clock = std::map<int64_t, int64_t>;

struct Capture {
  Graph* graph;
  int64_t origin;
  std::map<int64_t, Clock> streams, events;
  Contents before;
  uint64_t offset;
};

#define LOCKED std::lock_guard<std::recursive_mutex> guard(mutex)

std::recursive_mutex mutex;
std::map<int64_t, Pool>& pools = *new std::map<int64_t, Pool>;
std::map<void*, Place*>& places = *new std::map<void*, Place*>;
std::map<int64_t, Graph>& graphs = *new std::map<int64_t, Graph>;
thread_local int64_t pool_of_thread = 0;
std::unique_ptr<Capture>& capturing = *new std::unique_ptr<Capture>;  // one at a time
std::atomic<bool> is_capturing{false};  // most calls need no lock

void leave(int64_t number) {
  std::vector<void*> unused;
  {
    LOCKED;
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
  if (!is_capturing) return false;
  LOCKED;
  if (!capturing) return false;
  // As any work on the legacy default stream, which waits for all others.
  TORCH_CHECK(stream_now() != 0, "operation would make the legacy stream depend on a capturing blocking stream");
  return capturing->streams.count(stream_now());
}

void capture(Kernel kernel) {
  LOCKED;
  int64_t stream = stream_now();
  ++capturing->streams[stream][stream];
  capturing->graph->steps.push_back({Act::LAUNCH, stream, 0, std::move(kernel)});
}

void captured_record(int64_t event, int64_t stream) {
  if (!is_capturing) return;
  LOCKED;
  if (!capturing) return;
  capturing->events.erase(event);
  if (!capturing->streams.count(stream)) return;
  capturing->events[event] = capturing->streams[stream];
  capturing->graph->steps.push_back({Act::RECORD, stream, event, {}});
}

void captured_block(int64_t event, int64_t stream) {
  if (!is_capturing) return;
  LOCKED;
  if (!capturing) return;
  auto found = capturing->events.find(event);
  bool is_captured = capturing->streams.count(stream);
  if (found == capturing->events.end()) {
    TORCH_CHECK(!is_captured, "dependency created on uncaptured work in another stream");
    return;
  }
  TORCH_CHECK(stream != 0, "operation would make the legacy stream depend on a capturing blocking stream");
  for (auto& [other, count] : found->second) {
    int64_t& known = capturing->streams[stream][other];
    known = std::max(known, count);
  }
  capturing->graph->steps.push_back({Act::BLOCK, stream, event, {}});
}

void refuse_event(int64_t event) {
  if (!is_capturing) return;
  LOCKED;
  TORCH_CHECK(!capturing || !capturing->events.count(event), "operation not permitted on an event last recorded in a capturing stream");
}

void refuse_stream(int64_t stream) {
  if (!is_capturing) return;
  LOCKED;
  TORCH_CHECK(!capturing || !capturing->streams.count(stream), "operation not permitted when stream is capturing");
}

void refuse_device() {
  TORCH_CHECK(!is_capturing, "operation not permitted when stream is capturing");
}

void* take_from_pool(size_t bytes) {
  if (!is_capturing && !pool_of_thread) return nullptr;
  int64_t number;
  {
    LOCKED;
    bool is_captured = capturing && capturing->streams.count(stream_now());
    number = is_captured ? capturing->graph->pool : pool_of_thread;
    if (!number) return nullptr;
    Place* best = nullptr;
    for (Place& place : pools[number].places)
      if (!place.taken && !place.kept && place.stream == stream_now() && place.bytes >= bytes &&
          (!best || place.bytes < best->bytes))
        best = &place;
    if (best) {
      best->taken = true;
      return best->begin;
    }
  }
  void* begin = take_segment(bytes);  // tells of it, for which a listener may wait for whoever waits for the lock
  LOCKED;
  Pool& pool = pools[number];
  pool.places.push_back({begin, bytes, stream_now(), true});
  places[begin] = &pool.places.back();
  return begin;
}

void keep_in_pool(void* pointer) {
  LOCKED;
  auto found = places.find(pointer);
  if (found != places.end() && capturing) found->second->kept = true;
}

bool give_to_pool(void* pointer) {
  LOCKED;
  auto found = places.find(pointer);
  if (found == places.end()) return false;
  found->second->taken = false;
  return true;
}

}  // namespace simulated

using namespace simulated;

extern "C" {

void simulated_pool_begin(int64_t pool) {
  LOCKED;
  ++pools[pool].uses;
  pool_of_thread = pool;
}

void simulated_pool_end() {
  pool_of_thread = 0;
}

// Graphs of a pool, and threads that allocate from it; -1 of one that is not there yet.
int64_t simulated_pool_uses(int64_t pool) {
  LOCKED;
  auto found = pools.find(pool);
  return found == pools.end() ? -1 : found->second.uses;
}

void simulated_pool_release(int64_t pool) {
  leave(pool);
}

void simulated_capture_begin(int64_t graph, int64_t pool) {
  LOCKED;
  ++pools[pool].uses;
  int64_t origin = stream_now();
  graphs[graph] = {pool, {}, {}};
  capturing.reset(new Capture{&graphs[graph], origin, {{origin, {}}}, {}, contents(), random_offset()});
  is_capturing = true;
}

// Returns whether streams are left that the first one has not waited for, an error of CUDA's.
bool simulated_capture_end() {
  LOCKED;
  is_capturing = false;
  std::unique_ptr<Capture> ended = std::move(capturing);
  restore(ended->before);
  set_random_offset(ended->offset);
  bool is_joined = true;
  for (auto& [stream, clock] : ended->streams) {
    if (stream != ended->origin) ended->graph->streams[stream] = new_stream();
    is_joined &= ended->streams[ended->origin][stream] >= clock[stream];
  }
  return !is_joined;
}

bool simulated_captures() {
  LOCKED;
  return capturing && capturing->streams.count(stream_now());
}

// One launch, of all that was captured. What several streams do is told of each, as they are ordered by events only.
void simulated_replay(int64_t number) {
  Graph& graph = graphs.at(number);
  std::vector<Access> accesses;
  std::map<int64_t, int64_t> events;
  bool is_told = !graph.streams.empty();
  if (is_told) launched("a CUDA graph", stream_now(), {});
  for (Step& step : graph.steps) {
    auto found = graph.streams.find(step.stream);
    int64_t stream = found == graph.streams.end() ? stream_now() : found->second;
    if (step.act == Act::LAUNCH) {
      {
        Quiet silence;
        step.kernel.body();
      }
      accesses.insert(accesses.end(), step.kernel.accesses.begin(), step.kernel.accesses.end());
      if (is_told) launched(("captured " + step.kernel.name).c_str(), stream, step.kernel.accesses);
    } else if (is_told && step.act == Act::RECORD) {
      tell({RECORD, stream, events[step.event] = new_event()});
    } else if (is_told) {
      tell({BLOCK, stream, events.at(step.event)});
    }
  }
  if (!is_told) launched("a CUDA graph", stream_now(), accesses);
}

void simulated_graph_reset(int64_t number) {
  int64_t pool;
  {
    LOCKED;
    auto found = graphs.find(number);
    if (found == graphs.end()) return;
    pool = found->second.pool;
    graphs.erase(found);
  }
  leave(pool);
}

// The addresses that are taken in a pool; gives how many there are.
int64_t simulated_pool_taken(int64_t pool, int64_t* addresses, int64_t room) {
  LOCKED;
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
    LOCKED;
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
