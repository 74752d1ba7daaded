// Which sources of one worker's graph share a part of it. As `_autograd/backward/source_index.py`, but it also indexes
// contexts, and only knows whether a source meets another one.
#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>

#include <set>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "graph.h"

namespace backhaul {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::PyAnomalyMetadata;

// What Python gives once: the key of a boundary node's mark in its metadata, and the class of messages outside contexts.
struct Names {
  PyObject* mark = nullptr;
  PyObject* plain_recv = nullptr;
  PyObject* gradient_edge = nullptr;
};
inline Names names;

inline bool is_leaf(const Node& node) { return typeid(node) == typeid(AccumulateGrad); }

// The mark (recv, index) of a node; null if it is no recv node. Borrowed: the node keeps it.
inline PyObject* mark_of(Node& node) {
  if (typeid(node) != typeid(Error)) return nullptr;
  auto* metadata = static_cast<PyAnomalyMetadata*>(node.metadata());
  PyObject* mark = find_item(metadata->dict(), names.mark);
  return mark && PyTuple_Check(mark) && PyTuple_GET_SIZE(mark) == 2 ? mark : nullptr;
}

// Whether a message came outside contexts.
inline bool is_plain(PyObject* recv) { return reinterpret_cast<PyObject*>(Py_TYPE(recv)) == names.plain_recv; }

inline int64_t number_of(PyObject* object, PyObject* name) {
  return integer_of(Object(PyObject_GetAttr(object, name)).get());
}

// A message that a source reaches, and the nodes of its tensors. All are borrowed: the graph keeps them.
struct ReachedMessage {
  PyObject* recv;
  std::vector<std::pair<Py_ssize_t, Node*>> nodes;
};

struct SourceIndex;

// Where gradients enter: the edges of the tensors of a message, or the roots of a pass. Python's object of a send record
// holds it. All fields are used by the thread that holds the interpreter lock.
struct Source {
  edge_list edges;  // the first, so that it is destroyed last: destructors of the graph may run any code
  Object owner;     // of the index
  SourceIndex& index;
  bool indexed = true, walked = false;
  bool ordinary = false;             // it reaches no message of another context
  size_t place = 0;                  // among the sources that are not walked
  std::vector<Node*> nodes, leaves;  // those it has reached first; without leaves and recv nodes; all leaves
  std::vector<Node*> recv_nodes;
  std::vector<ReachedMessage> messages;
  std::set<Source*> stops, stoppers;  // sources whose nodes or messages it has met; those which have met its own

  static PyTypeObject type;

  Source(PyObject* index, edge_list edges);
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  ~Source();

  // Whether another source may have to run with it. Only after `SourceIndex::update`.
  bool alone() const { return ordinary && stops.empty() && stoppers.empty(); }

  Object ends();
};

// The sources of one context. Each source is walked once, as far as no other source has been before. Like the sources, it
// is used by the thread that holds the interpreter lock, and calls nothing that releases the lock.
struct SourceIndex {
  const unsigned long long mark;             // of the context; negative ones modulo 2^64
  std::unordered_map<Node*, Source*> owner;  // the source that has reached a node first
  std::unordered_map<PyObject*, Source*> owner_of_message;
  std::vector<Source*> pending;  // not walked yet
  size_t size = 0;               // how many sources there are

  static PyTypeObject type;

  explicit SourceIndex(unsigned long long mark) : mark(mark) {}

  static PyObject* make(PyTypeObject*, PyObject* arguments, PyObject*) {
    PyObject* number;
    if (!PyArg_ParseTuple(arguments, "O!", &PyLong_Type, &number)) return nullptr;
    return guarded([&] { return Box<SourceIndex>::make(PyLong_AsUnsignedLongLongMask(number)); });
  }

  // Walks the sources that are new.
  void update() {
    while (!pending.empty()) {
      Source* source = pending.back();
      pending.pop_back();
      walk(*source);
    }
  }

  void await_walk(Source& source) {
    source.walked = false;
    source.place = pending.size();
    pending.push_back(&source);
  }

  void walk(Source& source) {
    source.walked = true;
    source.ordinary = false;
    std::vector<Node*> ahead;
    for (const Edge& edge : source.edges) ahead.push_back(edge.function.get());
    std::unordered_set<Node*> leaves;
    bool ordinary = true;
    while (!ahead.empty()) {
      Node* node = ahead.back();
      ahead.pop_back();
      if (is_leaf(*node)) {
        if (leaves.insert(node).second) source.leaves.push_back(node);
        continue;
      }
      const auto [place, fresh] = owner.try_emplace(node, &source);
      if (!fresh) {
        stop(source, *place->second);
      } else if (PyObject* found = mark_of(*node)) {
        source.recv_nodes.push_back(node);
        if (!reach(source, *node, found)) ordinary = false;
      } else {
        source.nodes.push_back(node);
        for (const Edge& next : node->next_edges())
          if (next.function) ahead.push_back(next.function.get());
      }
    }
    source.ordinary = ordinary;
  }

  // A walk has come to a recv node. Returns false if that is one of another context.
  bool reach(Source& source, Node& node, PyObject* found) {
    static PyObject* context = interned("context");
    PyObject* recv = PyTuple_GET_ITEM(found, 0);
    const Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(found, 1));
    if (place == -1 && PyErr_Occurred()) throw PythonError();
    const Object of(PyObject_GetAttr(recv, context));
    if (PyLong_AsUnsignedLongLongMask(of.get()) != mark) return false;
    for (ReachedMessage& known : source.messages)
      if (known.recv == recv) return known.nodes.emplace_back(place, &node), true;
    source.messages.push_back({recv, {{place, &node}}});
    const auto [owning, fresh] = owner_of_message.try_emplace(recv, &source);
    if (!fresh) stop(source, *owning->second);  // one gradient message answers all tensors of a message
    return true;
  }

  static void stop(Source& source, Source& met) {
    if (&source == &met) return;
    source.stops.insert(&met);
    met.stoppers.insert(&source);
  }

  // Forgets what the walk from a source has found, except whom it has met.
  void unwalk(Source& source) {
    for (Node* node : source.nodes) owner.erase(node);
    for (Node* node : source.recv_nodes) owner.erase(node);
    for (const ReachedMessage& each : source.messages) {
      const auto found = owner_of_message.find(each.recv);
      if (found != owner_of_message.end() && found->second == &source) owner_of_message.erase(found);
    }
    source.nodes.clear();
    source.leaves.clear();
    source.recv_nodes.clear();
    source.messages.clear();
  }

  // A source is gone, or is not to be met. Those whose walks have stopped at what it owns are walked again.
  void remove(Source& source) {
    if (!std::exchange(source.indexed, false)) return;
    --size;
    if (source.walked) {
      unwalk(source);
    } else {
      pending[source.place] = pending.back();
      pending[source.place]->place = source.place;
      pending.pop_back();
    }
    for (Source* met : source.stops) met->stoppers.erase(&source);
    for (Source* stopper : source.stoppers) {
      stopper->stops.erase(&source);
      if (stopper->walked) {
        unwalk(*stopper);
        await_walk(*stopper);
      }
    }
    source.stops.clear();
    source.stoppers.clear();
  }
};

inline PyTypeObject SourceIndex::type = [] {
  PyTypeObject made = boxed_type<SourceIndex>("backhaul.SourceIndex", "SourceIndex(mark): the sources of one context.");
  made.tp_new = SourceIndex::make;
  return made;
}();

inline Source::Source(PyObject* index, edge_list edges)
    : edges(std::move(edges)), owner(Object::borrowed(index)), index(Box<SourceIndex>::of(index)) {
  this->index.await_walk(*this);
  ++this->index.size;
}

inline Source::~Source() { index.remove(*this); }

inline void drop_node(PyObject* capsule) {
  delete static_cast<NodePointer*>(PyCapsule_GetPointer(capsule, nullptr));
}

// [tensor or GradientEdge, ...]: a tensor stands for a leaf, as in `SendRecord.ends`.
inline Object Source::ends() {
  return list_of(edges.size(), [&](size_t i) {
    const auto& [function, input] = edges[i];
    if (is_leaf(*function)) return Object(THPVariable_Wrap(static_cast<AccumulateGrad&>(*function).variable));
    const Object node(torch::autograd::functionToPyObject(function)), number(PyLong_FromLong(input));
    // A node in Python does not keep its C++ part. So the edge gets an owner of that, as torch does.
    const Object token = THPFunction_Check(node.get())
                             ? Object(PyCapsule_New(new NodePointer(function), nullptr, drop_node))
                             : none();
    PyObject* arguments[] = {node.get(), number.get(), token.get()};
    return Object(PyObject_Vectorcall(names.gradient_edge, arguments, 3, nullptr));
  });
}

inline PyMethodDef source_methods[] = {
    method<&Source::ends>("ends", "The ends of the source, as in a send record of Python's."),
    {},
};
inline PyTypeObject Source::type =
    boxed_type<Source>("backhaul.Source", "Where gradients enter a worker's graph.", source_methods);

// The tensors of a message that require grad: their places, and where their gradients enter.
struct Sent {
  std::vector<size_t> places;
  edge_list edges;
  bool on_host = true;  // all of them

  // `tensors`: a list or tuple. `copies`: the places of tensors that are not recorded, as a set of Python's.
  Sent(PyObject* tensors, PyObject* copies) {
    const bool all = PySet_GET_SIZE(copies) == 0;
    for (size_t i = 0; i < size_of(tensors); ++i) {
      PyObject* object = item_of(tensors, i);
      if (!THPVariable_Check(object)) raise(PyExc_TypeError, "only tensors are recorded");
      const at::Tensor& tensor = THPVariable_Unpack(object);
      if (!tensor.requires_grad() || (!all && contains(copies, i))) continue;
      on_host = on_host && tensor.device().is_cpu();
      edges.push_back(torch::autograd::impl::gradient_edge(tensor));
      places.push_back(i);
    }
  }

 private:
  static bool contains(PyObject* set, size_t number) {
    const int found = PySet_Contains(set, Object(PyLong_FromSize_t(number)).get());
    if (found < 0) throw PythonError();
    return found;
  }
};

// received_behind(roots) -> the messages outside contexts that lie behind tensors: their Recv objects
inline Object received_behind(PyObject* roots) {
  if (!is_sequence(roots)) throw NotMine();
  std::vector<Node*> ahead;
  std::vector<NodePointer> kept;
  for (size_t i = 0; i < size_of(roots); ++i) {
    PyObject* object = item_of(roots, i);
    if (!THPVariable_Check(object)) throw NotMine();
    kept.push_back(THPVariable_Unpack(object).grad_fn());
    if (kept.back()) ahead.push_back(kept.back().get());
  }
  Object found(PyList_New(0));
  std::unordered_set<Node*> seen;
  std::unordered_set<PyObject*> listed;
  while (!ahead.empty()) {
    Node* node = ahead.back();
    ahead.pop_back();
    if (is_leaf(*node) || !seen.insert(node).second) continue;
    if (PyObject* mark = mark_of(*node)) {
      PyObject* recv = PyTuple_GET_ITEM(mark, 0);
      if (is_plain(recv) && listed.insert(recv).second) append(found.get(), recv);
      continue;
    }
    for (const Edge& next : node->next_edges())
      if (next.function) ahead.push_back(next.function.get());
  }
  return found;
}

}  // namespace backhaul
