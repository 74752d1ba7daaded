// Ordinary tensors: dense CPU tensors of a common dtype, or one element that is expanded. Everything else is Python's.
// The records are those of `_wire/tensors/specs.py`, `Ordinary`.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <limits>
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
constexpr size_t MAX_COPIED_BYTES = 1024;  // a copy of so many bytes costs less than keeping the buffer of the message

// The dispatch keys of a plain CPU tensor: not sparse, quantized, nested, conjugated, negated, fake or wrapped.
inline uint64_t ordinary_keys() {
  static const uint64_t keys = at::detail::empty_cpu({1}, at::kFloat, false, std::nullopt).key_set().raw_repr();
  return keys;
}

inline std::string_view dtype_name(at::ScalarType type) {
  for (const Dtype& each : DTYPES)
    if (each.type == type) return each.name;
  return {};
}

// What a message says of an ordinary tensor, and where the tensor's bytes are.
struct Outgoing {
  const char* data;
  size_t size;
};

// Adds the record of a tensor to a table. Throws `NotMine` if the tensor is not ordinary.
inline Outgoing write_tensor(Writer& table, const at::Tensor& tensor) {
  const std::string_view dtype = dtype_name(tensor.scalar_type());
  if (tensor.key_set().raw_repr() != ordinary_keys() || dtype.empty() || tensor.numel() == 0) throw NotMine();
  const bool dense = tensor.is_contiguous();
  if (!dense && std::any_of(tensor.strides().begin(), tensor.strides().end(), [](int64_t s) { return s != 0; }))
    throw NotMine();
  Writer record;
  record.array(4);
  record.text(dtype);
  record.array(tensor.sizes().size());
  for (int64_t size : tensor.sizes()) record.integer(size);
  record.boolean(tensor.requires_grad());
  record.boolean(!dense);
  const char* data = static_cast<const char*>(tensor.const_data_ptr());
  if (record.bytes.size() > MAX_RECORD_BYTES || !data) throw NotMine();
  table.binary(record.bytes);
  return {data, (dense ? static_cast<size_t>(tensor.numel()) : 1) * tensor.element_size()};
}

// Whether two tensors of a message use the same memory.
inline bool overlap(std::vector<Outgoing> spans) {
  std::sort(spans.begin(), spans.end(), [](const Outgoing& a, const Outgoing& b) { return a.data < b.data; });
  for (size_t i = 1; i < spans.size(); ++i)
    if (spans[i - 1].data + spans[i - 1].size > spans[i].data) return true;
  return false;
}

// The memory of a tensor that is sent, as an object with the buffer protocol. It keeps the tensor.
struct TensorMemory {
  PyObject_HEAD
  at::Tensor tensor;
  Outgoing span;

  static PyTypeObject type;

  static PyObject* make(const at::Tensor& tensor, Outgoing span) {
    auto* made = PyObject_New(TensorMemory, &type);
    if (!made) throw PythonError();
    new (&made->tensor) at::Tensor(tensor);
    made->span = span;
    return reinterpret_cast<PyObject*>(made);
  }

  static void dealloc(PyObject* self) {
    reinterpret_cast<TensorMemory*>(self)->tensor.~Tensor();
    PyObject_Free(self);
  }

  static Py_ssize_t length(PyObject* self) {
    return static_cast<Py_ssize_t>(reinterpret_cast<TensorMemory*>(self)->span.size);
  }

  static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const Outgoing& span = reinterpret_cast<TensorMemory*>(self)->span;
    return PyBuffer_FillInfo(view, self, const_cast<char*>(span.data), static_cast<Py_ssize_t>(span.size), 0, flags);
  }
};

inline PySequenceMethods memory_as_sequence = {.sq_length = TensorMemory::length};
inline PyBufferProcs memory_as_buffer = {.bf_getbuffer = TensorMemory::get_buffer};
inline PyTypeObject TensorMemory::type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "backhaul.TensorMemory",
    .tp_basicsize = sizeof(TensorMemory),
    .tp_dealloc = TensorMemory::dealloc,
    .tp_as_sequence = &memory_as_sequence,
    .tp_as_buffer = &memory_as_buffer,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The memory of a tensor that is sent.",
};

// A tensor on the memory of a buffer of a message. The tensor keeps the buffer.
inline at::Tensor adopt(PyObject* buffer, at::IntArrayRef shape, at::ScalarType type, size_t size) {
  const at::TensorOptions options = at::TensorOptions().dtype(type);
  auto* view = new Py_buffer;
  if (PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE)) {
    delete view;
    throw PythonError();
  }
  if (static_cast<size_t>(view->len) != size) {
    PyBuffer_Release(view);
    delete view;
    throw NotMine();
  }
  if (size <= MAX_COPIED_BYTES) {
    at::Tensor made = at::detail::empty_cpu(shape, type, false, std::nullopt);
    std::memcpy(made.mutable_data_ptr(), view->buf, size);
    PyBuffer_Release(view);
    delete view;
    return made;
  }
  const auto give_back = [view](void*) {
    if (!Py_IsInitialized()) return;  // the process ends
    const PyGILState_STATE state = PyGILState_Ensure();
    PyBuffer_Release(view);
    PyGILState_Release(state);
    delete view;
  };
  return at::from_blob(view->buf, shape, give_back, options);
}

// The tensor that a record and a buffer make. Throws `NotMine` if they do not fit.
inline at::Tensor read_tensor(std::string_view bytes, PyObject* buffer) {
  Reader record(bytes);
  record.array_of(4);
  const std::string_view name = record.text();
  const auto dtype = std::find_if(std::begin(DTYPES), std::end(DTYPES), [&](const Dtype& d) { return d.name == name; });
  if (dtype == std::end(DTYPES)) throw NotMine();
  std::vector<int64_t> shape(record.array());
  if (shape.size() > MAX_DIMENSIONS) throw NotMine();
  uint64_t elements = 1;
  for (int64_t& size : shape) {
    const uint64_t read = record.natural();
    if (read == 0 || read >= uint64_t{1} << 59 || elements > (uint64_t{1} << 59) / read) throw NotMine();
    elements *= read;
    size = static_cast<int64_t>(read);
  }
  const bool requires_grad = record.boolean(), expanded = record.boolean();
  if (record.left() || (requires_grad && !c10::isFloatingType(dtype->type))) throw NotMine();
  const size_t item = c10::elementSize(dtype->type);
  at::Tensor made;
  if (expanded) {
    if (shape.empty()) throw NotMine();
    const int64_t one = 1;
    made = adopt(buffer, at::IntArrayRef(&one, 1), dtype->type, item);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(shape, std::vector<int64_t>(shape.size(), 0));
  } else {
    made = adopt(buffer, shape, dtype->type, elements * item);
  }
  if (requires_grad) made.set_requires_grad(true);
  return made;
}

}  // namespace backhaul
