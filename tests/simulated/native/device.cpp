// A CUDA device that is not there: tensors on "cuda" whose memory is the host's, on the CPU build of torch.
//
// Kernels run at once, on the host, by torch's own CPU kernels. What a GPU orders by streams and events is told to a
// listener, which judges whether it is ordered. The library registers itself where torch's CUDA build would, so it is to
// be loaded behind libtorch_cpu and before `import torch`, which asks for CUDA once.
#include "graphs.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

namespace simulated {
namespace {

const Device DEVICE(DeviceType::CUDA, 0);
constexpr size_t MEMORY = size_t(8) << 30;
constexpr size_t ALIGNMENT = 512;  // as torch's allocators of device and of pinned memory

std::atomic<Listener> listener{nullptr};
std::atomic<int64_t> next_stream{1}, next_event{1};
thread_local int64_t current_stream = 0;
thread_local int quiet = 0;

Stream stream_of(int64_t id) {
  return Stream(Stream::UNSAFE, DEVICE, id);
}

int64_t address(const void* pointer) {
  return reinterpret_cast<int64_t>(pointer);
}

// -- memory ------------------------------------------------------------------------------------------------------------

// Blocks that are taken, by their addresses.
class Blocks {
 public:
  void* take(size_t bytes) {
    void* pointer = std::aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    std::lock_guard<std::mutex> guard(mutex_);
    taken_[address(pointer)] = bytes;
    used_ += bytes;
    peak_ = std::max(peak_, used_);
    return pointer;
  }
  void give(void* pointer) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      used_ -= taken_.at(address(pointer));
      taken_.erase(address(pointer));
    }
    std::free(pointer);
  }
  bool has(const void* pointer) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto behind = taken_.upper_bound(address(pointer));
    if (behind == taken_.begin()) return false;
    --behind;
    return address(pointer) < behind->first + int64_t(behind->second);
  }
  Contents contents() {
    std::lock_guard<std::mutex> guard(mutex_);
    Contents found;
    for (auto& [begin, bytes] : taken_) {
      char* pointer = reinterpret_cast<char*>(begin);
      found.emplace_back(pointer, std::vector<char>(pointer, pointer + bytes));
    }
    return found;
  }
  void restore(const Contents& before) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto& [begin, bytes] : before) {
      auto found = taken_.find(address(begin));
      if (found != taken_.end() && found->second == bytes.size()) std::memcpy(begin, bytes.data(), bytes.size());
    }
  }
  int64_t used() const { return used_; }
  int64_t peak() const { return peak_; }
  void forget_peak() { peak_ = used_; }

 private:
  std::mutex mutex_;
  std::map<int64_t, size_t> taken_;
  int64_t used_ = 0, peak_ = 0;
};

// Never destroyed: tensors of the interpreter's end give their memory back behind static destructors.
Blocks& device_blocks = *new Blocks;
Blocks& pinned_blocks = *new Blocks;

}  // namespace

void* take_segment(size_t bytes) {
  void* pointer = device_blocks.take(bytes);
  tell({ALLOCATE, current_stream, address(pointer), int64_t(bytes)});
  return pointer;
}

void give_segment(void* pointer) {
  tell({FREE, current_stream, address(pointer)});
  device_blocks.give(pointer);
}

void free_device(void* pointer) {
  if (pointer && !give_to_pool(pointer)) give_segment(pointer);
}

int64_t stream_now() {
  return current_stream;
}

Contents contents() {
  return device_blocks.contents();
}

void restore(const Contents& before) {
  device_blocks.restore(before);
}

int64_t new_stream() {
  return next_stream++;
}

int64_t new_event() {
  return next_event++;
}

namespace {

void free_pinned(void* pointer) {
  if (!pointer) return;
  tell({UNPIN, 0, address(pointer)});
  pinned_blocks.give(pointer);
}

struct Allocator final : c10::DeviceAllocator {
  DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_device, DEVICE};
    void* pointer = take_from_pool(bytes);
    if (!pointer) pointer = take_segment(bytes);
    return {pointer, pointer, &free_device, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const DataPtr& data, Stream stream) override {
    keep_in_pool(data.get());
    tell({KEEP, stream.id(), address(data.get())});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { return {}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { device_blocks.forget_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {MEMORY - device_blocks.used(), MEMORY}; }
};
Allocator& allocator = *new Allocator;

struct HostAllocator final : at::HostAllocator {
  DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_pinned, Device(DeviceType::CPU)};
    void* pointer = pinned_blocks.take(bytes);
    tell({PIN, 0, address(pointer), int64_t(bytes)});
    return {pointer, pointer, &free_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator& host_allocator = *new HostAllocator;

// -- streams and events ------------------------------------------------------------------------------------------------

// When events were recorded, and which of them the host has asked for: the first answer is "not yet", as it may be.
struct Events {
  std::mutex mutex;
  std::map<int64_t, std::chrono::steady_clock::time_point> recorded;
  std::set<int64_t> asked;
};
Events& events = *new Events;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return stream_of(current_stream); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getNewStream(Device, int) const override { return stream_of(next_stream++); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream_of(next_stream++); }
  Stream exchangeStream(Stream stream) const override {
    return stream_of(std::exchange(current_stream, stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream&) const override { return false; }
  void synchronizeStream(const Stream& stream) const override {
    refuse_stream(stream.id());
    tell({SYNC_STREAM, stream.id(), 0, 0, "synchronize"});
  }
  void synchronizeDevice(DeviceIndex) const override {
    refuse_device();
    tell({SYNC_DEVICE, 0, 0, 0, "synchronize"});
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(next_event++);
    {
      std::lock_guard<std::mutex> guard(events.mutex);
      events.recorded[address(*event)] = std::chrono::steady_clock::now();
      events.asked.erase(address(*event));
    }
    captured_record(address(*event), stream.id());
    tell({RECORD, stream.id(), address(*event)});
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    captured_block(address(event), stream.id());
    tell({BLOCK, stream.id(), address(event)});
  }
  bool queryEvent(void* event) const override {
    refuse_event(address(event));
    {
      std::lock_guard<std::mutex> guard(events.mutex);
      if (events.asked.insert(address(event)).second) return false;
    }
    tell({SEEN, 0, address(event)});
    return true;
  }
  void synchronizeEvent(void* event) const override {
    refuse_event(address(event));
    tell({SYNC_EVENT, 0, address(event), 0, "synchronize"});
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    std::lock_guard<std::mutex> guard(events.mutex);
    events.recorded.erase(address(event));
    events.asked.erase(address(event));
  }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    std::lock_guard<std::mutex> guard(events.mutex);
    auto passed = events.recorded.at(address(end)) - events.recorded.at(address(begin));
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override {
    tell({KEEP, stream.id(), address(data.get())});
  }
};
Guard guard;
c10::impl::DeviceGuardImplRegistrar registered_guard(DeviceType::CUDA, &guard);

// -- random numbers ----------------------------------------------------------------------------------------------------

// Seed and offset, as CUDA's generators have; an operation that draws moves the offset on. A capture lets nobody read or
// set them.
struct Generator final : c10::GeneratorImpl {
  Generator() : c10::GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    refuse_device();
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    refuse_device();
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    refuse_device();
    return offset_;
  }
  uint64_t current_seed() const override {
    refuse_device();
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    refuse_device();
    TORCH_CHECK(state.numel() == 16, "a state is 16 bytes");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    refuse_device();
    // Past the dispatcher, as CUDA's own: whoever traces gets a state and not a picture of one.
    Tensor state = at::detail::empty_cpu({16}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  // A seed for the next operation.
  uint64_t draw() {
    uint64_t mixed = seed_ * 6364136223846793005u + offset_ * 1442695040888963407u;
    offset_ += 4;
    return mixed;
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator;
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator() {
  static const at::Generator& generator = *new at::Generator(c10::make_intrusive<Generator>());
  return generator;
}

}  // namespace

uint64_t random_offset() {
  return default_generator().get_offset();
}

void set_random_offset(uint64_t offset) {
  at::Generator(default_generator()).set_offset(offset);
}

namespace {

// -- hooks -------------------------------------------------------------------------------------------------------------

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* pointer) const override { return pinned_blocks.has(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::Generator(c10::make_intrusive<Generator>());
  }
  void deviceSynchronize(DeviceIndex) const override { guard.synchronizeDevice(0); }
};
c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs> registered_hooks(
    "CUDAHooks",
    at::CUDAHooksRegistry(),
    [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<Hooks>(args); });

// -- operations --------------------------------------------------------------------------------------------------------

template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef())
      if (item.isTensor()) visit(item.toTensor());
  }
}

bool has_tag(const c10::OperatorHandle& op, at::Tag tag) {
  auto tags = op.getTags();
  return std::find(tags.begin(), tags.end(), tag) != tags.end();
}

std::vector<Access> accesses_of(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  std::vector<Access> accesses;
  for (size_t index = 0; index < args.size(); ++index) {
    const auto* alias = op.schema().arguments()[index].alias_info();
    bool writes = alias && alias->isWrite();
    each_tensor(args[index], [&](const Tensor& tensor) { touch(accesses, tensor, writes); });
  }
  return accesses;
}

// While it is there, the CPU's default generator draws what one of the device would.
struct Drawing {
  Drawing(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool draws) {
    if (!draws) return;
    at::Generator source = default_generator();
    const auto& arguments = op.schema().arguments();
    for (size_t index = 0; index < arguments.size(); ++index) {
      c10::IValue& value = torch::jit::peek(*stack, index, arguments.size());
      if (!value.isGenerator()) continue;
      source = value.toGenerator();
      value = c10::IValue();
    }
    cpu_ = at::detail::getDefaultCPUGenerator();
    before_ = cpu_.get_state();
    cpu_.set_current_seed(static_cast<Generator*>(source.unsafeGetGeneratorImpl())->draw());
  }
  ~Drawing() {
    if (before_.defined()) cpu_.set_state(before_);
  }

 private:
  at::Generator cpu_;
  Tensor before_;
};

// A tensor over the memory of another one, which it does not keep.
Tensor borrowed(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  void* data = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  auto nothing = [](void*) {};
  return at::for_blob(data, tensor.sizes()).strides(tensor.strides()).deleter(nothing).options(tensor.options())
      .target_device(DEVICE).make_tensor();
}

c10::IValue borrowed(const c10::IValue& value) {
  if (value.isTensor()) return borrowed(value.toTensor());
  if (!value.isList()) return value;
  auto list = value.toList().copy();
  for (size_t index = 0; index < list.size(); ++index) list.set(index, borrowed(list.get(index)));
  return list;
}

torch::jit::Stack borrowed_all(c10::ArrayRef<c10::IValue> values) {
  torch::jit::Stack result;
  for (const c10::IValue& value : values) result.push_back(borrowed(value));
  return result;
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Quiet silence;
  Drawing drawing(op, stack, has_tag(op, at::Tag::nondeterministic_seeded));
  at::native::cpu_fallback(op, stack);
}

// Computes again, and puts the results where they were the first time.
void compute_again(const c10::OperatorHandle& op, torch::jit::Stack stack, const torch::jit::Stack& results) {
  compute(op, &stack);
  for (size_t index = 0; index < results.size(); ++index) {
    std::vector<Tensor> to, from;
    each_tensor(results[index], [&](const Tensor& tensor) { to.push_back(tensor); });
    each_tensor(stack.at(index), [&](const Tensor& tensor) { from.push_back(tensor); });
    for (size_t one = 0; one < to.size(); ++one)
      if (to[one].defined() && to[one].const_data_ptr() != from[one].const_data_ptr())
        on_host(to[one]).copy_(on_host(from[one]));
  }
}

// Any operation: its CPU kernel, told as a kernel of the current stream, or of the graph that captures it.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t arguments = op.schema().arguments().size(), returns = op.schema().returns().size();
  bool waits = has_tag(op, at::Tag::dynamic_output_shape) || has_tag(op, at::Tag::data_dependent_output);
  TORCH_CHECK(!waits || !captures(), "operation not permitted when stream is capturing: ", op.schema().name());
  auto accesses = accesses_of(op, torch::jit::last(*stack, arguments));
  torch::jit::Stack given(torch::jit::last(*stack, arguments).begin(), torch::jit::last(*stack, arguments).end());
  compute(op, stack);
  for (const c10::IValue& value : torch::jit::last(*stack, returns))
    each_tensor(value, [&](const Tensor& tensor) { touch(accesses, tensor, true); });
  if (captures()) {
    // What is given to be filled has its size by now.
    auto again = [op, given = borrowed_all(given), results = borrowed_all(torch::jit::last(*stack, returns))] {
      compute_again(op, given, results);
    };
    capture({op.schema().name(), accesses, again});
    return;
  }
  launched(op.schema().name().c_str(), current_stream, accesses);
  if (waits) tell({SYNC_STREAM, current_stream, 0, 0, op.schema().name().c_str()});
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// A copy between device and host makes the host wait, unless it is asked not to and the memory is pinned.
Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  std::vector<Access> accesses;
  touch(accesses, from, false);
  touch(accesses, to, true);
  auto body = [source = on_host(from), target = on_host(to)] {
    Quiet silence;
    at::NoGradGuard no_grad;
    target.copy_(source.resolve_conj().resolve_neg());
  };
  body();
  if (captures() && !quiet) {
    TORCH_CHECK(to.is_cuda() == from.is_cuda(), "operation not permitted when stream is capturing: a copy to the host");
    capture({"aten::copy_", accesses, body});
    return to;
  }
  launched("aten::copy_", current_stream, accesses);
  if (to.is_cuda() == from.is_cuda()) return to;
  const Tensor& host = to.is_cuda() ? from : to;
  if (!non_blocking)
    tell({SYNC_STREAM, current_stream, 0, 0, "a blocking copy"});
  else if (host.numel() && !pinned_blocks.has(host.const_data_ptr()))
    tell({SYNC_STREAM, current_stream, 0, 0, "a copy of pageable memory"});
  return to;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy(target, from, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  Tensor target = to;
  if (target.sizes() != from.sizes()) at::native::resize_(target, from.sizes());
  return copy(target, from, false);
}

at::Scalar item(const Tensor& tensor) {
  TORCH_CHECK(!captures() || quiet, "operation not permitted when stream is capturing: aten::item");
  std::vector<Access> accesses;
  touch(accesses, tensor, false);
  launched("aten::item", current_stream, accesses);
  tell({SYNC_STREAM, current_stream, 0, 0, "aten::item"});
  Quiet silence;
  return on_host(tensor).item();
}

void record_stream(Tensor& tensor, Stream stream) {
  allocator.recordStream(tensor.storage().data_ptr(), stream);
}

void resize_storage(const Tensor& tensor, int64_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  DataPtr data = allocator.allocate(bytes);
  std::memcpy(data.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

// -- what the host does to pinned memory -------------------------------------------------------------------------------

// True for operations that read or write elements, not only sizes and pointers. What consists of others is seen there.
bool touches_memory(const c10::OperatorHandle& op) {
  static const std::set<std::string> none{"aten::is_pinned", "aten::is_same_size", "aten::is_set_to", "aten::set_",
                                          "aten::resize_", "aten::resize_as_", "aten::record_stream", "aten::_to_copy"};
  const std::string& name = op.schema().name();
  bool like = name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0;
  if (like || name.rfind("aten::new_", 0) == 0 || name.rfind("aten::empty", 0) == 0 || none.count(name)) return false;
  if (has_tag(op, at::Tag::inplace_view)) return false;
  for (const auto& given : op.schema().returns())
    if (given.alias_info() && !given.alias_info()->isWrite()) return false;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

// Called before each operation, on the thread that runs it.
std::unique_ptr<at::ObserverContext> watch(const at::RecordFunction& record) {
  auto name = quiet || !listener ? std::nullopt : record.operator_name();
  auto op = name ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!op || record.inputs().size() != op->schema().arguments().size() || !touches_memory(*op)) return nullptr;
  bool on_device = false;
  for (const c10::IValue& value : record.inputs())
    each_tensor(value, [&](const Tensor& tensor) { on_device |= tensor.defined() && tensor.is_cuda(); });
  auto accesses = on_device ? std::vector<Access>{} : accesses_of(*op, record.inputs());
  if (!accesses.empty()) tell({HOST, 0, 0, 0, name->name.c_str(), int64_t(accesses.size()), accesses.data()});
  return nullptr;
}

// The attention that a GPU of compute capability 8.0 or more runs: flash attention of 16-bit values without a mask, else
// the memory-efficient one, which knows no grouped queries, else several operations. torch's own choice is part of its
// CUDA build.
int64_t choose_attention(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask, double,
                         bool, std::optional<double>, bool grouped) {
  bool narrow = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (narrow && !mask) return int64_t(at::SDPBackend::flash_attention);
  return int64_t(grouped ? at::SDPBackend::math : at::SDPBackend::efficient_attention);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  using at::native::set_;
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

// What CUDA runs by kernels of its own, and others by several operations: it is to count as one here, too.
void take_over_composites() {
  static auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  static const std::set<std::string> whole{"aten::_chunk_cat", "aten::split_with_sizes_copy", "aten::cat"};
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    bool foreach = op.name.rfind("aten::_foreach_", 0) == 0 && op.name != "aten::_foreach_mm";
    if (!foreach && !whole.count(op.name)) continue;
    std::string name = op.name.substr(6) + (op.overload_name.empty() ? "" : "." + op.overload_name);
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

// torch's error for whoever reads a tensor whose memory a later step of a CUDA graph has overwritten.
void forbid(const Tensor& tensor, c10::string_view message) {
  tensor.unsafeGetTensorImpl()->release_storage_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

TORCH_LIBRARY(simulated, m) {
  m.def("forbid(Tensor tensor, str message) -> ()");
  m.def("resize_storage(Tensor tensor, int bytes) -> ()");
  m.def("default_generator() -> Generator?", &default_generator);
}

TORCH_LIBRARY_IMPL(simulated, CUDA, m) {
  m.impl("resize_storage", &resize_storage);
  m.impl("forbid", &forbid);
}

}  // namespace

void tell(const Event& event) {
  bool of_memory = event.kind == ALLOCATE || event.kind == FREE || event.kind == PIN || event.kind == UNPIN;
  if (quiet && !of_memory) return;
  if (Listener heard = listener) heard(&event);
}

void launched(const char* name, int64_t stream, const std::vector<Access>& accesses) {
  tell({LAUNCH, stream, 0, 0, name, int64_t(accesses.size()), accesses.data()});
}

void touch(std::vector<Access>& accesses, const Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.numel() || !tensor.has_storage()) return;
  if (!tensor.is_cuda() && !pinned_blocks.has(tensor.const_data_ptr())) return;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  uint64_t begin = address(tensor.const_data_ptr());
  accesses.push_back({begin, begin + (last + 1) * tensor.itemsize(), writes});
}

Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  void* data = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  return at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

Quiet::Quiet() {
  ++quiet;
}

Quiet::~Quiet() {
  --quiet;
}

}  // namespace simulated

extern "C" {

void simulated_start() {
  simulated::take_over_composites();
  c10::SetAllocator(DeviceType::CUDA, &simulated::allocator, 255);
  at::setHostAllocator(DeviceType::CUDA, &simulated::host_allocator);
  at::addGlobalCallback(at::RecordFunctionCallback(&simulated::watch).needsInputs(true).scopes(
      {at::RecordScope::FUNCTION}));
}

// From now on attention is traced as a GPU's kernels, which cannot run here.
void simulated_fuse_attention() {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&simulated::choose_attention);
}

void simulated_listen(simulated::Listener heard) {
  simulated::listener = heard;
}

int64_t simulated_current_stream() {
  return simulated::current_stream;
}

double simulated_elapsed(int64_t begin, int64_t end) {
  return simulated::guard.elapsedTime(reinterpret_cast<void*>(begin), reinterpret_cast<void*>(end), 0);
}

int64_t simulated_used() {
  return simulated::device_blocks.used();
}

int64_t simulated_peak() {
  return simulated::device_blocks.peak();
}
}
