// Ordinary tensors: dense CPU tensors of a common dtype, or one element that is expanded. Everything else is Python's.
// The records are those of `_wire/tensors/specs.py`, `Ordinary`.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "msgpack.h"
#include "python.h"

namespace backhaul {

struct Dtype {
  std::string_view name;
  at::ScalarType type;
};

constexpr Dtype DTYPES[] = {
    {"float32", at::kFloat}, {"float64", at::kDouble}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
    {"int64", at::kLong},    {"int32", at::kInt},      {"uint8", at::kByte},   {"bool", at::kBool},
};

constexpr size_t MAX_RECORD_BYTES = 1024;  // as in `_wire/tensors/specs.py`
constexpr size_t MAX_DIMENSIONS = 64;
constexpr uint64_t MAX_ELEMENTS = (uint64_t{1} << 59) - 1;  // as in `_wire/tensors/reader.py`
constexpr size_t MAX_COPIED_BYTES = 1024;  // a copy of so many bytes costs less than keeping the buffer of the message

// Whether `object` is a `torch.Tensor`, and of no subclass.
inline bool is_tensor(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass; }

// Whether a tensor is a plain CPU tensor: not sparse, quantized, nested, conjugated, negated, fake, wrapped or made in
// inference mode.
inline bool has_ordinary_keys(const at::Tensor& tensor) {
  static const uint64_t keys = [] {
    const c10::InferenceMode off(false);
    return at::detail::empty_cpu({1}, at::kFloat, false, std::nullopt).key_set().raw_repr();
  }();
  return tensor.key_set().raw_repr() == keys;
}

// The memory of an ordinary tensor.
struct Span {
  const char* data;
  size_t size;
};

// Adds the record of a tensor to a table. Throws `NotMine` if the tensor is not ordinary.
inline Span write_tensor(Writer& table, const at::Tensor& tensor) {
  if (!has_ordinary_keys(tensor)) throw NotMine();
  const at::ScalarType type = tensor.scalar_type();
  const auto dtype = std::find_if(std::begin(DTYPES), std::end(DTYPES), [&](const Dtype& d) { return d.type == type; });
  if (dtype == std::end(DTYPES) || tensor.numel() == 0) throw NotMine();
  const bool dense = tensor.is_contiguous();
  const at::IntArrayRef strides = tensor.strides();
  if (!dense && std::any_of(strides.begin(), strides.end(), [](int64_t s) { return s != 0; })) throw NotMine();
  // Only inside `forward_ad.dual_level()`; Python raises an error that names the value.
  if (tensor.unsafeGetTensorImpl()->autograd_meta() && tensor._fw_grad(0).defined()) throw NotMine();
  Writer record;
  record.array(4);
  record.text(dtype->name);
  record.array(tensor.sizes().size());
  for (int64_t size : tensor.sizes()) record.integer(size);
  record.boolean(tensor.requires_grad());
  record.boolean(!dense);
  // As `data_ptr()` in Python, which gives a tensor that shares its memory until it is written memory of its own.
  const char* data = static_cast<const char*>(tensor.mutable_data_ptr());
  if (record.bytes.size() > MAX_RECORD_BYTES || !data) throw NotMine();
  table.binary(record.bytes);
  return {data, (dense ? static_cast<size_t>(tensor.numel()) : 1) * tensor.element_size()};
}

// Whether two tensors of a message use the same memory.
inline bool overlap(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.data < b.data; });
  for (size_t i = 1; i < spans.size(); ++i)
    if (spans[i - 1].data + spans[i - 1].size > spans[i].data) return true;
  return false;
}

// The memory of a tensor that is sent, as an object with the buffer protocol. It keeps the tensor.
struct TensorMemory {
  at::Tensor tensor;
  Span span;

  static PyTypeObject type;

  static Py_ssize_t length(PyObject* self) { return static_cast<Py_ssize_t>(Box<TensorMemory>::of(self).span.size); }

  static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const Span& span = Box<TensorMemory>::of(self).span;
    return PyBuffer_FillInfo(view, self, const_cast<char*>(span.data), static_cast<Py_ssize_t>(span.size), 1, flags);
  }
};

inline PySequenceMethods memory_as_sequence = {.sq_length = TensorMemory::length};
inline PyBufferProcs memory_as_buffer = {.bf_getbuffer = TensorMemory::get_buffer};
inline PyTypeObject TensorMemory::type = [] {
  PyTypeObject made = boxed_type<TensorMemory>("backhaul.TensorMemory", "The memory of a tensor that is sent.");
  made.tp_as_sequence = &memory_as_sequence;
  made.tp_as_buffer = &memory_as_buffer;
  return made;
}();

// A tensor on the memory of a buffer of a message, which the tensor keeps. Throws `NotMine` unless the buffer can be
// written to and has `size` bytes.
inline at::Tensor adopt(PyObject* buffer, at::IntArrayRef shape, at::ScalarType type, size_t size) {
  std::unique_ptr<View> view;
  try {
    view = std::make_unique<View>(buffer, PyBUF_WRITABLE);
  } catch (const PythonError&) {
    PyErr_Clear();
    throw NotMine();
  }
  if (view->size() != size) throw NotMine();
  if (size <= MAX_COPIED_BYTES) {
    at::Tensor made = at::detail::empty_cpu(shape, type, false, std::nullopt);
    std::memcpy(made.mutable_data_ptr(), view->data(), size);
    return made;
  }
  void* const data = view->data();
  const auto give_back = [view = view.get()](void*) {
    if (!Py_IsInitialized()) return;  // the process ends
    const PyGILState_STATE state = PyGILState_Ensure();
    delete view;
    PyGILState_Release(state);
  };
  at::Tensor made = at::from_blob(data, shape, give_back, at::TensorOptions().dtype(type));
  view.release();
  return made;
}

// A tensor of a message, and whether it requires grad.
struct ReadTensor {
  at::Tensor tensor;
  bool requires_grad;
};

// The tensor that a record and a buffer make. Throws `NotMine` if they do not fit.
inline ReadTensor read_tensor(std::string_view bytes, PyObject* buffer) {
  if (bytes.size() > MAX_RECORD_BYTES) throw NotMine();
  Reader record(bytes);
  record.array_of(4);
  const std::string_view name = record.text();
  const auto dtype = std::find_if(std::begin(DTYPES), std::end(DTYPES), [&](const Dtype& d) { return d.name == name; });
  if (dtype == std::end(DTYPES)) throw NotMine();
  const size_t dimensions = record.array();
  if (dimensions > MAX_DIMENSIONS) throw NotMine();
  std::vector<int64_t> shape(dimensions);
  uint64_t elements = 1;
  for (int64_t& size : shape) {
    const uint64_t read = record.natural();
    if (read == 0 || read > MAX_ELEMENTS / elements) throw NotMine();
    elements *= read;
    size = static_cast<int64_t>(read);
  }
  const bool requires_grad = record.boolean(), expanded = record.boolean();
  if (record.left() || (requires_grad && !c10::isFloatingType(dtype->type))) throw NotMine();
  const size_t item = c10::elementSize(dtype->type);
  at::Tensor made;
  if (expanded) {
    const int64_t one = 1;
    made = adopt(buffer, at::IntArrayRef(&one, 1), dtype->type, item);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(shape, std::vector<int64_t>(shape.size(), 0));
  } else {
    made = adopt(buffer, shape, dtype->type, elements * item);
  }
  if (requires_grad) made.set_requires_grad(true);
  return {std::move(made), requires_grad};
}

}  // namespace backhaul
