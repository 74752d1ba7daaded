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

inline PyObject* interned(const char* text) {
  PyObject* made = PyUnicode_InternFromString(text);
  if (!made) throw PythonError();
  return made;
}

inline bool is_leaf(const Node& node) { return typeid(node) == typeid(AccumulateGrad); }

// The mark (recv, index) of a node; null if it is no recv node. Borrowed: the node keeps it.
inline PyObject* mark_of(Node& node) {
  if (typeid(node) != typeid(Error)) return nullptr;
  auto* metadata = static_cast<PyAnomalyMetadata*>(node.metadata());
  PyObject* mark = PyDict_GetItemWithError(metadata->dict(), names.mark);
  if (!mark && PyErr_Occurred()) throw PythonError();
  return mark && PyTuple_Check(mark) && PyTuple_GET_SIZE(mark) == 2 ? mark : nullptr;
}

inline long long number_of(PyObject* object, PyObject* name) {
  const Object value(PyObject_GetAttr(object, name));
  const long long number = PyLong_AsLongLong(value.get());
  if (number == -1 && PyErr_Occurred()) throw PythonError();
  return number;
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
  PyObject_HEAD
  SourceIndex* index;  // a reference
  edge_list edges;
  bool indexed, walked, ordinary;   // ordinary: it reaches no message of another context
  size_t place;                     // among the sources that are not walked
  std::vector<Node*> nodes, leaves;  // those it has reached first; without leaves and recv nodes; all leaves
  std::vector<Node*> recv_nodes;
  std::vector<ReachedMessage> messages;
  std::set<Source*> stops, stoppers;  // sources whose nodes or messages it has met; those which have met its own

  static PyTypeObject type;
  static Source* of(PyObject* self) { return reinterpret_cast<Source*>(self); }
  static PyObject* make(SourceIndex* index, edge_list edges);
  static void dealloc(PyObject* self);
  static PyObject* ends(PyObject* self, PyObject*);

  // Whether another source may have to run with it. Only after `SourceIndex::update`.
  bool alone() const { return ordinary && stops.empty() && stoppers.empty(); }
};

// The sources of one context. Each source is walked once, as far as no other source has been before. Like the sources, it
// is used by the thread that holds the interpreter lock, and calls nothing that releases the lock.
struct SourceIndex {
  PyObject_HEAD
  unsigned long long mark;  // of the context; negative ones modulo 2^64
  std::unordered_map<Node*, Source*> owner;  // the source that has reached a node first
  std::unordered_map<PyObject*, Source*> owner_of_message;
  std::vector<Source*> pending;  // not walked yet
  size_t size;                   // how many sources there are

  static PyTypeObject type;
  static SourceIndex* of(PyObject* self) { return reinterpret_cast<SourceIndex*>(self); }

  static PyObject* make(PyTypeObject* kind, PyObject* arguments, PyObject*) {
    PyObject* number;
    if (!PyArg_ParseTuple(arguments, "O!", &PyLong_Type, &number)) return nullptr;
    const unsigned long long mark = PyLong_AsUnsignedLongLongMask(number);
    auto* made = PyObject_New(SourceIndex, kind);
    if (!made) return nullptr;
    made->mark = mark;
    made->size = 0;
    new (&made->owner) decltype(made->owner)();
    new (&made->owner_of_message) decltype(made->owner_of_message)();
    new (&made->pending) decltype(made->pending)();
    return reinterpret_cast<PyObject*>(made);
  }

  static void dealloc(PyObject* self) {
    SourceIndex* index = of(self);
    index->owner.~unordered_map();
    index->owner_of_message.~unordered_map();
    index->pending.~vector();
    PyObject_Free(self);
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

inline PyTypeObject SourceIndex::type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "backhaul.SourceIndex",
    .tp_basicsize = sizeof(SourceIndex),
    .tp_dealloc = SourceIndex::dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "SourceIndex(mark): the sources of one context.",
    .tp_new = SourceIndex::make,
};

inline PyObject* Source::make(SourceIndex* index, edge_list edges) {
  auto* made = PyObject_New(Source, &type);
  if (!made) throw PythonError();
  Py_INCREF(reinterpret_cast<PyObject*>(index));
  made->index = index;
  new (&made->edges) edge_list(std::move(edges));
  made->ordinary = false;
  new (&made->nodes) decltype(made->nodes)();
  new (&made->leaves) decltype(made->leaves)();
  new (&made->recv_nodes) decltype(made->recv_nodes)();
  new (&made->messages) decltype(made->messages)();
  new (&made->stops) decltype(made->stops)();
  new (&made->stoppers) decltype(made->stoppers)();
  made->indexed = true;
  ++index->size;
  index->await_walk(*made);
  return reinterpret_cast<PyObject*>(made);
}

inline void Source::dealloc(PyObject* self) {
  Source* source = of(self);
  SourceIndex* index = source->index;
  index->remove(*source);
  edge_list edges = std::move(source->edges);
  source->edges.~edge_list();
  source->nodes.~vector();
  source->leaves.~vector();
  source->recv_nodes.~vector();
  source->messages.~vector();
  source->stops.~set();
  source->stoppers.~set();
  PyObject_Free(self);
  Py_DECREF(reinterpret_cast<PyObject*>(index));
  edges.clear();  // the last: destructors of the graph may run any code
}

inline void drop_node(PyObject* capsule) {
  delete static_cast<NodePointer*>(PyCapsule_GetPointer(capsule, nullptr));
}

// [tensor or GradientEdge, ...]: a tensor stands for a leaf, as in `SendRecord.ends`.
inline PyObject* Source::ends(PyObject* self, PyObject*) {
  try {
    const edge_list& edges = of(self)->edges;
    Object list(PyList_New(static_cast<Py_ssize_t>(edges.size())));
    for (size_t i = 0; i < edges.size(); ++i) {
      PyObject* made;
      if (is_leaf(*edges[i].function)) {
        made = THPVariable_Wrap(static_cast<AccumulateGrad&>(*edges[i].function).variable);
      } else {
        const Object node(torch::autograd::functionToPyObject(edges[i].function));
        // A node in Python does not keep its C++ part. So the edge gets an owner of that, as torch does.
        Object token = THPFunction_Check(node.get())
                           ? Object(PyCapsule_New(new NodePointer(edges[i].function), nullptr, drop_node))
                           : Object::borrowed(Py_None);
        const Object number(PyLong_FromLong(edges[i].input_nr));
        PyObject* arguments[] = {node.get(), number.get(), token.get()};
        made = PyObject_Vectorcall(names.gradient_edge, arguments, 3, nullptr);
      }
      if (!made) throw PythonError();
      PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), made);
    }
    return list.release();
  } catch (const PythonError&) {
    return nullptr;
  }
}

inline PyMethodDef source_methods[] = {
    {"ends", Source::ends, METH_NOARGS, "The ends of the source, as in a send record of Python's."},
    {},
};

inline PyTypeObject Source::type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "backhaul.Source",
    .tp_basicsize = sizeof(Source),
    .tp_dealloc = Source::dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Where gradients enter a worker's graph.",
    .tp_methods = source_methods,
};

// The tensors of a message that require grad: their places, and where their gradients enter.
struct Sent {
  std::vector<Py_ssize_t> places;
  edge_list edges;
  bool on_host = true;  // all of them

  // `tensors`: a list or tuple. `copies`: the places of tensors that are not recorded, as a set of Python's.
  Sent(PyObject* tensors, PyObject* copies) {
    const bool all = PySet_GET_SIZE(copies) == 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors); ++i) {
      PyObject* object = PySequence_Fast_GET_ITEM(tensors, i);
      if (!THPVariable_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "only tensors are recorded");
        throw PythonError();
      }
      const at::Tensor& tensor = THPVariable_Unpack(object);
      if (!tensor.requires_grad() || (!all && contains(copies, i))) continue;
      on_host = on_host && tensor.device().is_cpu();
      edges.push_back(torch::autograd::impl::gradient_edge(tensor));
      places.push_back(i);
    }
  }

 private:
  static bool contains(PyObject* set, Py_ssize_t number) {
    const Object object(PyLong_FromSsize_t(number));
    const int found = PySet_Contains(set, object.get());
    if (found < 0) throw PythonError();
    return found;
  }
};

// The messages outside contexts that lie behind tensors: their Recv objects.
inline Object received_behind(PyObject* roots) {
  std::vector<Node*> ahead;
  std::vector<NodePointer> kept;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(roots); ++i) {
    PyObject* object = PySequence_Fast_GET_ITEM(roots, i);
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
      if (reinterpret_cast<PyObject*>(Py_TYPE(recv)) == names.plain_recv && listed.insert(recv).second &&
          PyList_Append(found.get(), recv))
        throw PythonError();
      continue;
    }
    for (const Edge& next : node->next_edges())
      if (next.function) ahead.push_back(next.function.get());
  }
  return found;
}

}  // namespace backhaul
