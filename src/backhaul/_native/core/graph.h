// Received tensors as part of the graph: each becomes the output of a recv node, see `_autograd/forward/functions.py`.
#pragma once

#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_anomaly_mode.h>

#include <memory>
#include <unordered_set>
#include <vector>

#include "tensors.h"

namespace backhaul {

using torch::autograd::Error;
using torch::autograd::Node;
using NodePointer = decltype(torch::autograd::Edge::function);  // another one since torch 2.12

template <class Pointer>
Pointer make_node(const std::string& message) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>)
    return std::make_shared<Error>(message);
  else
    return Pointer(c10::make_intrusive<Error>(message));
}

// A reference to a node that other references keep.
template <class Pointer = NodePointer, class AnyNode>
Pointer hold(AnyNode* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<AnyNode>>) return node->getptr();
  else return Pointer::unsafe_reclaim_from_nonowning(node);
}

// `tensor` as the output of a new boundary node that has `mark` in its metadata, as `BoundaryNode.put` makes it.
inline at::Tensor behind_boundary(const at::Tensor& tensor, const std::string& message, PyObject* key, PyObject* mark) {
  at::Tensor made = tensor.tensor_data();
  const NodePointer node = make_node<NodePointer>(message);
  torch::autograd::set_history(made, node);
  auto* metadata = static_cast<torch::autograd::PyAnomalyMetadata*>(node->metadata());
  set_item(metadata->dict(), key, mark);
  return made;
}

// Whether the tensors are ordinary, and each has memory of its own. If not, tensors that share memory may have to be
// copied, see `apart` in `_autograd/forward/functions.py`.
inline bool share_nothing(PyObject* tensors) {
  std::unordered_set<const void*> seen;
  for (size_t i = 0; i < size_of(tensors); ++i) {
    if (!is_tensor(item_of(tensors, i))) return false;
    const at::Tensor& tensor = THPVariable_Unpack(item_of(tensors, i));
    if (!has_ordinary_keys(tensor) || tensor.grad_fn()) return false;
    if (!seen.insert(tensor.storage().data()).second) return false;
  }
  return true;
}

// record_received(tensors, positions, recv, key, text) -> the tensors of a message, with those at `positions` recorded
// under the marks (recv, 0), (recv, 1), ... Throws `NotMine` for tensors that are not ordinary or share memory, and for
// positions that are not all different.
inline Object record_received(PyObject* tensors, PyObject* positions, PyObject* recv, PyObject* key, PyObject* text) {
  if (!PyList_CheckExact(tensors) || !PyTuple_CheckExact(positions) || !share_nothing(tensors)) throw NotMine();
  const char* message = PyUnicode_AsUTF8(text);
  if (!message) throw PythonError();
  Object list(PyList_GetSlice(tensors, 0, PyList_GET_SIZE(tensors)));
  for (size_t i = 0; i < size_of(positions); ++i) {
    const Py_ssize_t place = PyLong_AsSsize_t(item_of(positions, i));
    if (place < 0 || static_cast<size_t>(place) >= size_of(list.get())) {
      PyErr_Clear();
      throw NotMine();
    }
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(list.get(), place));
    if (tensor.grad_fn() || !torch::autograd::isDifferentiableType(tensor.scalar_type())) throw NotMine();
    const Object mark(Py_BuildValue("(On)", recv, static_cast<Py_ssize_t>(i)));
    Object made(THPVariable_Wrap(behind_boundary(tensor, message, key, mark.get())));
    if (PyList_SetItem(list.get(), place, made.release())) throw PythonError();
  }
  return list;
}

}  // namespace backhaul
