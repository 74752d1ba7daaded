// One run of PyTorch's engine for several sources that meet no others and that no hook looks at. What it does for them
// is what `_autograd/backward/ready_groups.py` does; everything unusual is left to that.
#pragma once

#include <ATen/ops/add.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include "source_index.h"

namespace backhaul {

using torch::autograd::variable_list;

constexpr int64_t SMALL_NUMEL = 1 << 14;  // as in `_autograd/torch_engine/run.py`

// Gives the interpreter lock away.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// The engine runs all nodes on the calling thread, see `_autograd/torch_engine/run.py`.
class OnThisThread {
 public:
  OnThisThread() : before_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) { set(false); }
  OnThisThread(const OnThisThread&) = delete;
  OnThisThread& operator=(const OnThisThread&) = delete;
  ~OnThisThread() { set(before_); }

 private:
  static void set(bool enabled) { c10::AutogradState::get_tls_state().set_multithreading_enabled(enabled); }

  const bool before_;
};

// Whether nobody looks at a node that does not run. Hooks of tensors are called nevertheless.
inline bool is_unhooked(const Node& node) { return node.pre_hooks().empty() && node.post_hooks().empty(); }

// Whether the gradient of a leaf is only added: no hook or reducer sees it.
inline bool adds_only(const AccumulateGrad& node) {
  return is_unhooked(node) && torch::autograd::impl::hooks(node.variable).empty() &&
         !torch::autograd::impl::post_acc_grad_hooks(node.variable);
}

// Whether only `tensor` refers to its tensor. An object of Python's is a reference of its own: if there may be one, it
// must be all that is left.
inline bool is_sole(at::Tensor& tensor) {
  if (tensor.use_count() != 2) return tensor.use_count() == 1;
  const Object object(THPVariable_Wrap(tensor));
  tensor.reset();
  const bool sole = Py_REFCNT(object.get()) == 1 && THPVariable_Unpack(object.get()).use_count() == 1;
  tensor = THPVariable_Unpack(object.get());
  return sole;
}

// Whether nothing else refers to a gradient or to its memory, so that its only owner may change it in place.
inline bool is_own(at::Tensor& grad) {
  if (grad.layout() == at::kSparse) return !grad.requires_grad() && is_sole(grad);  // its parts belong to it alone
  return has_ordinary_keys(grad) && grad.storage().use_count() == 1 && grad.is_non_overlapping_and_dense() &&
         !grad.requires_grad() && is_sole(grad);
}

// Gradients of leaves that are still to be added.
struct LeafGradients {
  struct Sum {
    at::Tensor leaf, grad;
    bool own;  // only this object refers to the memory of the gradient
  };

  std::vector<Sum> sums;

  static PyTypeObject type;

  // Adds a gradient that came in a message.
  void add(const at::Tensor& leaf, const at::Tensor& grad) {
    for (Sum& sum : sums) {
      if (!sum.leaf.is_same(leaf)) continue;
      if (sum.own) {
        sum.grad.add_(grad);
      } else {
        sum.grad = at::add(sum.grad, grad);
        sum.own = true;
      }
      return;
    }
    sums.push_back({leaf, grad, false});
  }

  // Takes what `work` does not take, as [(leaf, gradient, whether other code may see its memory), ...].
  template <class Work>
  Object take(Work work) {
    at::NoGradGuard no_grad;
    std::vector<Sum> all = std::exchange(sums, {});
    Object left;
    for (Sum& sum : all) {
      if (work(sum)) continue;
      if (!left) left = Object(PyList_New(0));
      const Object leaf(THPVariable_Wrap(sum.leaf)), grad(THPVariable_Wrap(sum.grad));
      append(left.get(), Object(PyTuple_Pack(3, leaf.get(), grad.get(), sum.own ? Py_False : Py_True)).get());
    }
    return left ? std::move(left) : none();
  }

  // Leaves all of them to Python.
  Object rest() {
    return take([](Sum&) { return false; });
  }

  // Adds to `.grad`, as accumulation nodes do. The caller holds the lock of `grad_writers`.
  Object add_to_grad() {
    return take([](Sum& sum) {
      at::Tensor& grad = sum.leaf.mutable_grad();
      if (!has_ordinary_keys(sum.grad) || sum.grad.requires_grad()) return false;
      if (!grad.defined()) {
        if (sum.own && torch::autograd::utils::obeys_layout_contract(sum.grad, sum.leaf)) grad = std::move(sum.grad);
        else grad = torch::autograd::utils::clone_obey_contract(sum.grad, sum.leaf);
        return true;
      }
      if (!has_ordinary_keys(grad) || grad.requires_grad() || sum.grad.numel() > SMALL_NUMEL) return false;
      grad.add_(sum.grad);
      return true;
    });
  }

  // Adds to the gradients of a context, out of place. The caller holds its lock.
  Object add_to_table(PyObject* table) {
    if (!PyDict_CheckExact(table)) raise(PyExc_TypeError, "the table must be a dict");
    return take([table](Sum& sum) {
      if (!has_ordinary_keys(sum.grad)) return false;
      const Object leaf(THPVariable_Wrap(sum.leaf));
      if (PyObject* before = find_item(table, leaf.get())) {
        if (!THPVariable_CheckExact(before) || !has_ordinary_keys(THPVariable_Unpack(before))) return false;
        sum.grad = at::add(THPVariable_Unpack(before), sum.grad);
      } else if (!sum.own) {
        sum.grad = sum.grad.clone();
      }
      set_item(table, leaf.get(), Object(THPVariable_Wrap(std::move(sum.grad))).get());
      return true;
    });
  }
};

inline PyMethodDef leaf_gradients_methods[] = {
    method<&LeafGradients::rest>("rest", "What Python has to add: all, or None if there are none."),
    method<&LeafGradients::add_to_grad>("add_to_grad", "Add to `.grad`. Returns what Python has to add, or None."),
    method<&LeafGradients::add_to_table>("add_to_table", "Add to a dict. Returns what Python has to add, or None."),
    {},
};
inline PyTypeObject LeafGradients::type = boxed_type<LeafGradients>(
    "backhaul.LeafGradients", "Gradients of leaves that are still to be added.", leaf_gradients_methods);

// A message that a run answers.
struct Message {
  PyObject* recv;  // kept by the run
  std::vector<Py_ssize_t> places;
  std::vector<at::Tensor> found;  // by place
  size_t missing = 0;             // nodes whose gradients have not arrived; 0 also if nobody counts them
  bool sent = false;              // before the end of the run

  Message(PyObject* recv, size_t count) : recv(recv), found(count) {}

  void take(size_t node, const at::Tensor& grad) {
    const auto place = static_cast<size_t>(places[node]);
    if (place >= found.size()) throw std::out_of_range("a recv node has no place in its message");
    found[place] = grad;
  }

  Object grads() const {
    return list_of(found.size(), [&](size_t i) {
      return found[i].defined() ? Object(THPVariable_Wrap(found[i])) : none();
    });
  }
};

// Gradients on their way to one worker.
struct Answers {
  Object recvs, messages, counts, grads;
  int64_t nbytes = 0;

  Answers() : recvs(PyList_New(0)), messages(PyList_New(0)), counts(PyList_New(0)), grads(PyList_New(0)) {}

  void add(const Message& message, PyObject* id) {
    const Object count(PyLong_FromSize_t(message.found.size())), found = message.grads();
    const Py_ssize_t end = PyList_GET_SIZE(grads.get());
    append(recvs.get(), message.recv);
    append(messages.get(), id);
    append(counts.get(), count.get());
    if (PyList_SetSlice(grads.get(), end, end, found.get())) throw PythonError();
    for (const at::Tensor& each : message.found)
      if (each.defined()) nbytes += size_of(each);
  }

  // About what a gradient takes in a frame. One that is not ordinary goes alone.
  static int64_t size_of(const at::Tensor& grad) {
    constexpr int64_t large = int64_t{1} << 40;
    if (!has_ordinary_keys(grad)) return large;
    const bool expanded = std::all_of(grad.strides().begin(), grad.strides().end(), [](int64_t s) { return s == 0; });
    return static_cast<int64_t>(grad.element_size()) * (expanded ? 1 : grad.numel());
  }

  Object finish(int64_t worker) const {
    return Object(Py_BuildValue("(LOOOOL)", static_cast<long long>(worker), recvs.get(), messages.get(), counts.get(),
                                grads.get(), static_cast<long long>(nbytes)));
  }
};

// Sends the gradients of a message as soon as all of them have arrived, while the engine still runs. One object serves
// one run, on its thread.
class EarlySends {
 public:
  explicit EarlySends(PyObject* send) : send_(send), outer_(std::exchange(current, this)) {}
  EarlySends(const EarlySends&) = delete;
  EarlySends& operator=(const EarlySends&) = delete;
  ~EarlySends() { current = outer_; }

  // Waits for the gradients of a message. Hooks of the user's tensors see them first. Unless this run is the `only` one,
  // another may be reading the hooks of the nodes: then a message whose nodes have no hook yet is sent at the end.
  void watch(Message& message, const std::vector<Node*>& nodes, bool only) {
    message.missing = 0;
    if (!only && !std::all_of(nodes.begin(), nodes.end(), is_watched)) return;
    message.missing = nodes.size();
    for (size_t i = 0; i < nodes.size(); ++i) {
      watched_.emplace(nodes[i], std::pair(&message, i));
      if (!is_watched(nodes[i])) nodes[i]->add_tensor_pre_hook(std::make_unique<Hook>(nodes[i]));
    }
  }

 private:
  struct Hook : torch::autograd::FunctionPreHook {
    explicit Hook(Node* node) : node(node) {}

    variable_list operator()(const variable_list& grads) override {
      if (current && node->tensor_pre_hooks().back().get() == this) current->arrive(node, grads.at(0));
      return grads;
    }

    Node* const node;  // which owns this
  };

  static bool is_watched(Node* node) {
    const auto& hooks = node->tensor_pre_hooks();
    return !hooks.empty() && dynamic_cast<Hook*>(hooks.back().get());
  }

  void arrive(Node* node, const at::Tensor& grad) {
    const auto found = watched_.find(node);
    if (found == watched_.end()) return;
    auto& [message, place] = found->second;
    pybind11::gil_scoped_acquire interpreter;
    try {
      message->take(place, grad);
      if (--message->missing) return;
      message->sent = true;
      const Object grads = message->grads();
      const Object done(PyObject_CallFunctionObjArgs(send_, message->recv, grads.get(), nullptr));
    } catch (const PythonError&) {
      python_error error;
      error.persist();
      throw std::move(error);
    }
  }

  static inline thread_local EarlySends* current = nullptr;

  PyObject* const send_;
  EarlySends* const outer_;
  std::unordered_map<Node*, std::pair<Message*, size_t>> watched_;
};

// One run of the engine, and what is needed to understand what it has found. It keeps all of the graph that it uses.
class EngineRun {
 public:
  // `counts[i]` of the gradients belong to `sources[i]`: a source, or the id of a message in `records`. Throws `NotMine`
  // unless this core may run all of them. `send(recv, grads)` sends gradients of sources with more than `most_nodes`
  // nodes as soon as they have arrived. `forget`: from now on others need not look for these sources.
  EngineRun(SourceIndex& index, PyObject* records, PyObject* sources, PyObject* counts, PyObject* grads,
            Py_ssize_t most_nodes, PyObject* send, bool forget)
      : sums_(Box<LeafGradients>::make()), send_(send) {
    index.update();
    // Hooks of a leaf must see the sum of all its gradients. With one source there is nothing to add.
    const bool hooks_allowed = index.size == 1;
    std::unordered_set<Node*> leaves;
    std::unordered_set<Source*> seen;
    Py_ssize_t used = 0;
    for (size_t i = 0; i < size_of(sources); ++i) {
      Source& source = find(records, item_of(sources, i));
      if (&source.index != &index || !source.alone() || !seen.insert(&source).second) throw NotMine();
      for (Node* node : source.leaves) {
        if (!leaves.insert(node).second) continue;
        const auto& leaf = static_cast<AccumulateGrad&>(*node);
        if (!has_ordinary_keys(leaf.variable)) throw NotMine();
        if (leaf.variable.requires_grad() && !adds_only(leaf)) hooked_ = true;
      }
      if (hooked_ && !hooks_allowed) throw NotMine();
      const Py_ssize_t count = PyLong_AsSsize_t(item_of(counts, i));
      if (count < 0 || count > PyList_GET_SIZE(grads) - used || static_cast<size_t>(count) > source.edges.size())
        throw NotMine();
      for (Py_ssize_t place = 0; place < count; ++place, ++used)
        enter(source.edges[static_cast<size_t>(place)], PyList_GET_ITEM(grads, used));
      const bool early = static_cast<Py_ssize_t>(source.nodes.size()) > most_nodes;
      for (const ReachedMessage& message : source.messages) reach(message, early);
    }
    for (Node* leaf : leaves) outputs_.emplace_back(hold(leaf), 0);
    for (Source* source : seen)
      if (forget) index.remove(*source);
  }

  // Runs the engine. `runs` counts the runs under way, with this one. Returns (gradients of leaves, whether hooks or
  // reducers must see them, [(worker, recvs, messages, counts, gradients, bytes), ...], the messages that are answered
  // with their workers).
  Object operator()(bool retain, PyObject* runs) {
    static PyObject* count = interned("count");
    add_seeds();
    variable_list found(outputs_.size());
    if (!roots_.empty() && !outputs_.empty()) {
      EarlySends early(send_);
      const bool only = number_of(runs, count) == 1;  // nothing gives the interpreter away until the engine runs
      size_t used = 0;
      for (Message& message : messages_) {
        std::vector<Node*> nodes;
        for (size_t i = 0; i < message.places.size(); ++i) nodes.push_back(outputs_[used++].function.get());
        if (message.missing) early.watch(message, nodes, only);
      }
      OnThisThread one;
      WithoutInterpreter without;
      found = torch::autograd::Engine::get_default_engine().execute(roots_, seeds_, retain, false, false, outputs_);
    }
    roots_.clear();
    seeds_.clear();
    take_leaves(found);
    const Object produced(PyDict_New()), answers = answer(found, produced.get());
    return Object(PyTuple_Pack(4, sums_.get(), hooked_ ? Py_True : Py_False, answers.get(), produced.get()));
  }

 private:
  static Source& find(PyObject* records, PyObject* object) {
    static PyObject* name = interned("source");
    if (Box<Source>::holds(object)) return Box<Source>::of(object);
    PyObject* record = find_item(records, object);
    if (!record) throw NotMine();
    return unbox<Source>(Object(PyObject_GetAttr(record, name)).get());  // the record keeps it
  }

  // A gradient that has arrived at an edge.
  void enter(const Edge& edge, PyObject* object) {
    if (object == Py_None) return;
    if (!THPVariable_CheckExact(object)) throw NotMine();
    const at::Tensor& grad = THPVariable_Unpack(object);
    if (grad.requires_grad() || !grad.device().is_cpu()) throw NotMine();
    if (is_leaf(*edge.function)) {
      const auto& node = static_cast<AccumulateGrad&>(*edge.function);
      if (!node.variable.requires_grad()) return;  // frozen since the forward: its gradient is dropped
      if (adds_only(node)) {
        if (!has_ordinary_keys(grad) || !grad.sizes().equals(node.variable.sizes()) ||
            grad.scalar_type() != node.variable.scalar_type())
          throw NotMine();
        arrived_.push_back({node.variable, grad});
        return;
      }
    }
    roots_.push_back(edge);
    seeds_.push_back(grad);
  }

  void reach(const ReachedMessage& reached, bool early) {
    static PyObject* count = interned("count");
    kept_.push_back(Object::borrowed(reached.recv));
    Message& message = messages_.emplace_back(reached.recv, static_cast<size_t>(number_of(reached.recv, count)));
    message.missing = early;
    for (const auto& [place, node] : reached.nodes) {
      if (!is_unhooked(*node)) throw NotMine();
      message.places.push_back(place);
      outputs_.emplace_back(hold(node), 0);
    }
  }

  // Adds the gradients that have arrived at leaves.
  void add_seeds() {
    at::NoGradGuard no_grad;
    for (const auto& [leaf, grad] : arrived_) Box<LeafGradients>::of(sums_.get()).add(leaf, grad);
  }

  void take_leaves(variable_list& found) {
    size_t used = 0;
    for (const Message& message : messages_) used += message.places.size();
    for (size_t i = used; i < found.size(); ++i) {
      const at::Tensor& leaf = static_cast<AccumulateGrad&>(*outputs_[i].function).variable;
      if (!found[i].defined() || !leaf.requires_grad()) continue;
      at::Tensor grad = std::move(found[i]);
      const bool own = is_own(grad);
      Box<LeafGradients>::of(sums_.get()).sums.push_back({leaf, std::move(grad), own});
    }
  }

  Object answer(const variable_list& found, PyObject* produced) {
    static PyObject *sender = interned("sender"), *id = interned("message");
    std::vector<std::pair<int64_t, Answers>> by_worker;
    size_t used = 0;
    for (Message& message : messages_) {
      for (size_t i = 0; i < message.places.size(); ++i) message.take(i, found[used++]);
      const int64_t worker = number_of(message.recv, sender);
      const Object to(PyLong_FromLongLong(worker)), number(PyObject_GetAttr(message.recv, id));
      set_item(produced, number.get(), to.get());
      if (message.sent) continue;
      auto known = std::find_if(by_worker.begin(), by_worker.end(), [&](const auto& one) { return one.first == worker; });
      if (known == by_worker.end()) known = by_worker.emplace(by_worker.end(), worker, Answers());
      known->second.add(message, number.get());
    }
    return list_of(by_worker.size(), [&](size_t i) { return by_worker[i].second.finish(by_worker[i].first); });
  }

  Object sums_;
  PyObject* const send_;
  bool hooked_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> arrived_;  // leaves and gradients
  edge_list roots_, outputs_;                               // outputs: recv nodes, then leaves
  variable_list seeds_;
  std::vector<Object> kept_;
  std::vector<Message> messages_;
};

}  // namespace backhaul
