// NCCL that is not there: collectives on the simulated device, ordered as ProcessGroupNCCL orders them.
//
// Each group has a stream of its own. An asynchronous collective runs there, behind what the current stream was given,
// and `wait` lets the current stream wait for it; its tensors are held until then. One that is not asynchronous runs on
// the current stream. Bytes are moved at once: by a backend of hosts, or, in a world of which only this rank is there,
// as if all ranks had sent what this one has.
#include "graphs.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pybind11/chrono.h>
#include <torch/extension.h>

#include <functional>
#include <map>

using at::Tensor;
using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<Tensor>;

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);

c10::impl::VirtualGuardImpl device() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA);
}

void* record(c10::Stream stream) {
  void* event = nullptr;
  device().record(&event, stream, 0, c10::EventFlag::PYTORCH_DEFAULT);
  return event;
}

class StreamWork : public Work {
 public:
  StreamWork(int rank, c10d::OpType type, c10::Stream stream, Tensors held)
      : Work(rank, type), stream_(stream), end_(record(stream)), held_(std::move(held)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{DEVICE});
    future_->markCompleted(c10::IValue(held_));
  }
  // Of a work that nobody waited for, torch holds the tensors until its watchdog has seen it end.
  ~StreamWork() override {
    for (const Tensor& tensor : held_) device().recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
    device().destroyEvent(end_, 0);
  }
  bool isCompleted() override { return device().queryEvent(end_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = ::kNoTimeout) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    device().block(end_, device().getStream(DEVICE));
    held_.clear();
  }
  Tensors result() override { return held_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::Stream stream_;
  void* end_;
  Tensors held_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A message from one rank to one other, whose bytes arrive when they do: the host waits for them where the current
// stream would. Nobody waits for what was sent: a copy of it is on its way.
class MessageWork final : public StreamWork {
 public:
  MessageWork(int rank, c10d::OpType type, c10::Stream stream, Tensors held, c10::intrusive_ptr<Work> arriving)
      : StreamWork(rank, type, stream, std::move(held)), arriving_(std::move(arriving)) {}
  // Of one that nobody waited for, the bytes arrive in memory that is still there.
  ~MessageWork() override {
    static auto* left = new std::vector<std::pair<Tensors, c10::intrusive_ptr<Work>>>;
    if (arriving_) left->emplace_back(result(), std::move(arriving_));
  }
  void synchronize() override {
    arrive();
    StreamWork::synchronize();
  }

 private:
  void arrive() {
    if (arriving_) arriving_->wait();
    arriving_.reset();
  }

  c10::intrusive_ptr<Work> arriving_;
};

class Nccl final : public Backend {
 public:
  struct Options : Backend::Options {
    Options() : Backend::Options("nccl") {}
    bool is_high_priority_stream = false;
  };

  Nccl(int rank, int size, c10::intrusive_ptr<Options> options, c10::intrusive_ptr<Backend> transport)
      : Backend(rank, size),
        options_(std::move(options)),
        transport_(std::move(transport)),
        stream_(device().getStreamFromGlobalPool(DEVICE, options_->is_high_priority_stream)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_.size(); }
  bool supportsCoalescing() const override { return true; }
  c10::intrusive_ptr<Options> options() const { return options_; }
  const std::vector<std::string>& calls() const { return calls_; }

  void startCoalescing() override { coalescing_ = Launch{}; }

  c10::intrusive_ptr<Work> endCoalescing() override {
    Launch launch = std::move(*coalescing_);
    coalescing_.reset();
    return finish(std::move(launch));
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return run({"all_reduce", c10d::OpType::ALLREDUCE, opts.asyncOp}, tensors, tensors, [=, this](Tensors& in, Tensors&) {
      if (transport_) send([&](const auto& op) { return transport_->allreduce(in, sums(opts, op)); }, opts.reduceOp, in);
    });
  }

  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    bool root = opts.rootRank == rank_;
    return run({"broadcast", c10d::OpType::BROADCAST, opts.asyncOp}, tensors, root ? Tensors{} : tensors,
               [=, this](Tensors& in, Tensors&) {
                 if (transport_) transport_->broadcast(in, opts)->wait();
               });
  }

  // Only the root's memory is written to; in a world that is not there its average is what it has sent itself.
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    bool root = opts.rootRank == rank_;
    return run({"reduce", c10d::OpType::REDUCE, opts.asyncOp}, tensors, root ? tensors : Tensors{},
               [=, this](Tensors& in, Tensors&) {
                 if (!transport_) return;
                 Tensors all;
                 for (const Tensor& tensor : in) all.push_back(tensor.clone());
                 send([&](const auto& op) {
                   c10d::AllreduceOptions sum;
                   sum.reduceOp = op;
                   return transport_->allreduce(all, sum);
                 }, opts.reduceOp, all);
                 if (root) for (size_t index = 0; index < in.size(); ++index) in[index].copy_(all[index]);
               });
  }

  c10::intrusive_ptr<Work> _allgather_base(Tensor& full, Tensor& shard, const c10d::AllgatherOptions& opts) override {
    Tensors fulls{full}, shards{shard};
    return allgather_into_tensor_coalesced(fulls, shards, opts);
  }

  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& fulls, Tensors& shards, const c10d::AllgatherOptions& opts) override {
    Tensors written;
    for (size_t index = 0; index < fulls.size(); ++index) written = joined(written, written_by(fulls[index], shards[index]));
    return run({"all_gather", c10d::OpType::_ALLGATHER_BASE, opts.asyncOp}, shards, written, [=, this](Tensors& in, Tensors&) {
      for (size_t index = 0; index < fulls.size(); ++index) {
        Tensor full = simulated::on_host(fulls[index]);
        if (transport_) {
          Tensor sent = in[index].clone();  // gloo reads it while it writes: in place it would be its own
          transport_->_allgather_base(full, sent, opts)->wait();
        } else {
          full.view({size_, -1}).copy_(in[index].reshape({1, -1}).clone());
        }
      }
    });
  }

  c10::intrusive_ptr<Work> allgather(
      std::vector<Tensors>& fulls, Tensors& shards, const c10d::AllgatherOptions& opts) override {
    return run({"all_gather", c10d::OpType::ALLGATHER, opts.asyncOp}, shards, fulls[0], [=, this](Tensors& in, Tensors& out) mutable {
      std::vector<Tensors> outs{out};
      if (transport_) transport_->allgather(outs, in, opts)->wait();
      else for (Tensor& one : out) one.copy_(in[0]);
    });
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(
      Tensor& shard, Tensor& full, const c10d::ReduceScatterOptions& opts) override {
    Tensors fulls{full}, shards{shard};
    return reduce_scatter_tensor_coalesced(shards, fulls, opts);
  }

  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& shards, Tensors& fulls, const c10d::ReduceScatterOptions& opts) override {
    return run({"reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, opts.asyncOp}, fulls, shards,
               [=, this](Tensors& in, Tensors& out) mutable {
                 for (size_t index = 0; index < in.size(); ++index) reduce_scatter(in[index], out[index], opts);
               });
  }

  c10::intrusive_ptr<Work> alltoall_base(
      Tensor& arrived, Tensor& sent, std::vector<int64_t>& arrivedSizes, std::vector<int64_t>& sentSizes,
      const c10d::AllToAllOptions& opts) override {
    return run({"all_to_all", c10d::OpType::ALLTOALL_BASE, opts.asyncOp}, {sent}, {arrived},
               [=, this](Tensors& in, Tensors& out) mutable {
                 if (transport_) transport_->alltoall_base(out[0], in[0], arrivedSizes, sentSizes, opts)->wait();
                 else out[0].copy_(in[0]);
               });
  }

  c10::intrusive_ptr<Work> scatter(
      Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& opts) override {
    return run({"scatter", c10d::OpType::SCATTER, opts.asyncOp}, ins.empty() ? Tensors{} : ins[0], outs,
               [=, this](Tensors& in, Tensors& out) mutable {
                 std::vector<Tensors> given;
                 if (!in.empty()) given.push_back(in);
                 if (transport_) transport_->scatter(out, given, opts)->wait();
                 else out[0].copy_(in.at(rank_));
               });
  }

  c10::intrusive_ptr<Work> send(Tensors& tensors, int peer, int tag) override {
    if (transport_) {
      simulated::Quiet silence;
      Tensors copies;
      for (const Tensor& tensor : tensors) copies.push_back(simulated::on_host(tensor).clone());
      sent_.emplace_back(copies, transport_->send(copies, peer, tag));
    }
    return message({"send", c10d::OpType::SEND, true}, peer, tensors, {}, {});
  }

  // In a world that is not there zeros arrive.
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int peer, int tag) override {
    c10::intrusive_ptr<Work> arriving;
    {
      simulated::Quiet silence;
      at::NoGradGuard no_grad;
      Tensors hosts;
      for (const Tensor& tensor : tensors) hosts.push_back(simulated::on_host(tensor));
      if (transport_) arriving = transport_->recv(hosts, peer, tag);
      else for (Tensor& host : hosts) host.zero_();
    }
    return message({"recv", c10d::OpType::RECV, true}, peer, {}, tensors, std::move(arriving));
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override {
    if (transport_) transport_->barrier(opts)->wait();
    device().synchronizeDevice(0);
    return c10::make_intrusive<StreamWork>(rank_, c10d::OpType::BARRIER, stream_, Tensors{});
  }

 private:
  struct Call {
    const char* name;
    c10d::OpType type;
    bool asynchronous;
  };
  struct Launch {
    Call call{"nothing", c10d::OpType::UNKNOWN, true};
    Tensors read, written;
    std::vector<std::function<void()>> bodies;  // within a capture
  };
  using Body = std::function<void(Tensors&, Tensors&)>;

  static Tensors joined(Tensors first, const Tensors& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }

  // In place, the own slot is read only.
  Tensors written_by(const Tensor& full, const Tensor& shard) const {
    auto address = [](const Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); };
    if (address(shard) < address(full) || address(shard) >= address(full) + full.nbytes()) return {full};
    Tensor rows = full.view({size_, -1});
    TORCH_CHECK(address(shard) == address(rows[rank_]), "in place, NCCL wants a rank's shard in its own slot");
    return {rows.narrow(0, 0, rank_), rows.narrow(0, rank_ + 1, size_ - rank_ - 1)};
  }

  void reduce_scatter(Tensor& in, Tensor& out, const c10d::ReduceScatterOptions& opts) {
    Tensor rows = in.reshape({size_, -1});
    if (!transport_) {  // all ranks have what this one has: their average is that, and so is what stands for their sum
      out.view({-1}).copy_(rows[rank_].clone());
      return;
    }
    Tensors all{rows.clone()};
    send([&](const auto& op) {
      c10d::AllreduceOptions sum;
      sum.reduceOp = op;
      return transport_->allreduce(all, sum);
    }, opts.reduceOp, all);
    out.view({-1}).copy_(all[0][rank_]);
  }

  static c10d::AllreduceOptions sums(c10d::AllreduceOptions opts, const c10d::ReduceOp& op) {
    opts.reduceOp = op;
    return opts;
  }

  // Hosts have no average: they sum, and the sum is divided.
  template <class Send>
  void send(Send start, const c10d::ReduceOp& op, Tensors& tensors) {
    bool averages = op == c10d::ReduceOp::AVG;
    start(averages ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op)->wait();
    if (averages)
      for (Tensor& tensor : tensors) tensor.div_(size_);
  }

  c10::intrusive_ptr<Work> run(Call call, const Tensors& read, const Tensors& written, const Body& body) {
    Tensors in, out;
    for (const Tensor& tensor : read) in.push_back(simulated::on_host(tensor));
    for (const Tensor& tensor : written) out.push_back(simulated::on_host(tensor));
    auto move = [this, call, in, out, body]() mutable {
      note(call.name, in);
      simulated::Quiet silence;
      at::NoGradGuard no_grad;
      body(in, out);
    };
    bool is_captured = simulated::captures();  // no rank gets anything until the graph is replayed
    if (!is_captured) move();
    Launch launch{call, read, written, {}};
    if (is_captured) launch.bodies.push_back(move);
    if (!coalescing_) return finish(std::move(launch));
    coalescing_->call = call;
    coalescing_->read = joined(coalescing_->read, read);
    coalescing_->written = joined(coalescing_->written, written);
    for (auto& one : launch.bodies) coalescing_->bodies.push_back(one);
    return nullptr;
  }

  // Launches one kernel for all that was coalesced.
  c10::intrusive_ptr<Work> finish(Launch launch) {
    c10::Stream current = device().getStream(DEVICE), stream = launch.call.asynchronous ? stream_ : current;
    if (launch.call.asynchronous) {
      void* begin = record(current);
      device().block(begin, stream);
      device().destroyEvent(begin, 0);
    }
    std::vector<simulated::Access> accesses;
    for (const Tensor& tensor : launch.read) simulated::touch(accesses, tensor, false);
    for (const Tensor& tensor : launch.written) simulated::touch(accesses, tensor, true);
    launched(launch, stream, accesses);
    Tensors held = joined(launch.written, launch.read);
    return c10::make_intrusive<StreamWork>(rank_, launch.call.type, stream, std::move(held));
  }

  void launched(const Launch& launch, c10::Stream stream, const std::vector<simulated::Access>& accesses) {
    std::string name = std::string("nccl::") + launch.call.name;
    if (launch.bodies.empty()) return simulated::launched(name.c_str(), stream.id(), accesses);
    c10::Stream current = device().exchangeStream(stream);
    simulated::capture({name, accesses, [bodies = launch.bodies] { for (auto& body : bodies) body(); }});
    device().exchangeStream(current);
  }

  // Each pair of ranks has a stream of its own, on which its messages follow each other.
  c10::intrusive_ptr<Work> message(
      Call call, int peer, const Tensors& read, const Tensors& written, c10::intrusive_ptr<Work> arriving) {
    note(call.name, read.empty() ? written : read);
    auto found = pairs_.find(peer);
    if (found == pairs_.end()) found = pairs_.emplace(peer, device().getStreamFromGlobalPool(DEVICE, false)).first;
    c10::Stream stream = found->second;
    void* begin = record(device().getStream(DEVICE));
    device().block(begin, stream);
    device().destroyEvent(begin, 0);
    std::vector<simulated::Access> accesses;
    for (const Tensor& tensor : read) simulated::touch(accesses, tensor, false);
    for (const Tensor& tensor : written) simulated::touch(accesses, tensor, true);
    simulated::launched((std::string("nccl::") + call.name).c_str(), stream.id(), accesses);
    return c10::make_intrusive<MessageWork>(rank_, call.type, stream, joined(written, read), std::move(arriving));
  }

  void note(const char* name, const Tensors& tensors) {
    std::string call = name;
    for (const Tensor& tensor : tensors) call += c10::str(" ", tensor.dtype().name(), tensor.sizes());
    calls_.push_back(call);
  }

  c10::intrusive_ptr<Options> options_;
  c10::intrusive_ptr<Backend> transport_;
  c10::Stream stream_;
  std::map<int, c10::Stream> pairs_;
  std::vector<std::pair<Tensors, c10::intrusive_ptr<Work>>> sent_;  // kept for the life of the group: a test's is short
  std::optional<Launch> coalescing_;
  std::vector<std::string> calls_;
};

}  // namespace

PYBIND11_MODULE(simulated_nccl, module) {
  py::object backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<Nccl, Backend, c10::intrusive_ptr<Nccl>> bound(module, "Nccl");
  py::class_<Nccl::Options, Backend::Options, c10::intrusive_ptr<Nccl::Options>>(bound, "Options")
      .def(py::init<>())
      .def_readwrite("is_high_priority_stream", &Nccl::Options::is_high_priority_stream)
      .def_readwrite("_timeout", &Nccl::Options::timeout)
      .def_readwrite("global_ranks_in_group", &Nccl::Options::global_ranks_in_group)
      .def_readwrite("group_name", &Nccl::Options::group_name);
  bound
      .def(py::init<int, int, c10::intrusive_ptr<Nccl::Options>, c10::intrusive_ptr<Backend>>(),
           py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("transport"))
      .def_property_readonly("options", &Nccl::options)
      .def("calls", &Nccl::calls);
}
