// The functions that Python calls. Each does what its twin in Python does, or returns None: "not mine".
#include "autograd.h"
#include "frames.h"
#include "graph.h"
#include "guarded.h"
#include "values.h"

namespace backhaul {
namespace {

// A payload that has arrived, as an object of Python's.
struct IncomingPayload {
  PyObject_HEAD
  Payload payload;

  static PyTypeObject type;

  static Payload& of(PyObject* self) { return reinterpret_cast<IncomingPayload*>(self)->payload; }

  static void dealloc(PyObject* self) {
    of(self).~Payload();
    PyObject_Free(self);
  }

  static PyObject* tensors(PyObject* self, PyObject* link) { return Py_NewRef(of(self).tensors()); }

  static PyObject* values(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    if (!PyList_Check(arguments[0])) return PyErr_SetString(PyExc_TypeError, "tensors must be a list"), nullptr;
    try {
      return of(self).values(arguments[0], arguments[1]).release();
    } catch (const NotMine&) {
      PyErr_SetString(PyExc_ValueError, "malformed nested values");
    } catch (const PythonError&) {
    }
    return nullptr;
  }

  static PyObject* decline(PyObject* self, PyObject* link) { Py_RETURN_NONE; }
};

PyMethodDef payload_methods[] = {
    {"tensors", IncomingPayload::tensors, METH_O, "The tensors of the message."},
    {"values", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(IncomingPayload::values)), METH_FASTCALL,
     "The values, with these tensors, for a worker."},
    {"decline", IncomingPayload::decline, METH_O, "Nobody reads the message; it has no slots to give back."},
    {},
};

PyTypeObject IncomingPayload::type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0).tp_name = "backhaul.IncomingPayload",
    .tp_basicsize = sizeof(IncomingPayload),
    .tp_dealloc = IncomingPayload::dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The values and tensors of a message that has arrived.",
    .tp_methods = payload_methods,
};

// set_callbacks(take_apart, put_together)
PyObject* set_callbacks(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 2)) return nullptr;
  callbacks = {Py_NewRef(arguments[0]), Py_NewRef(arguments[1])};
  Py_RETURN_NONE;
}

// encode(values, main_shared, apart) -> (payload, buffers, tensors, parcels)
PyObject* encode(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 3)) return nullptr;
  return guarded([&]() -> PyObject* {
    PyObject* values = arguments[0];
    if (!PyTuple_CheckExact(values) && !PyList_CheckExact(values)) throw NotMine();
    const auto size = static_cast<size_t>(PySequence_Fast_GET_SIZE(values));
    const Object parcels(PyList_New(0));
    ValueWriter writer(arguments[1] == Py_True, arguments[2] == Py_True, parcels.get());
    const std::string payload = writer.write(PySequence_Fast_ITEMS(values), size);
    const Object bytes(PyBytes_FromStringAndSize(payload.data(), static_cast<Py_ssize_t>(payload.size())));
    const Object buffers = writer.buffers(), tensors = writer.tensors();
    return PyTuple_Pack(4, bytes.get(), buffers.get(), tensors.get(), parcels.get());
  });
}

// read_payload(body, buffers) -> IncomingPayload
PyObject* read_payload(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 2)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (!PyList_Check(arguments[1]) && !PyTuple_Check(arguments[1])) throw NotMine();
    const View body(arguments[0]);
    Payload payload(arguments[0], {body.data(), body.size()}, arguments[1]);
    auto* made = PyObject_New(IncomingPayload, &IncomingPayload::type);
    if (!made) throw PythonError();
    new (&made->payload) Payload(std::move(payload));
    return reinterpret_cast<PyObject*>(made);
  });
}

// cut_frames(frames, Frame, memory, start, end, limit, most_buffers) -> new start
PyObject* cut(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 7)) return nullptr;
  return guarded([&]() -> PyObject* {
    const View memory(arguments[2]);
    size_t numbers[4];
    for (int i = 0; i < 4; ++i) {
      numbers[i] = PyLong_AsSize_t(arguments[3 + i]);
      if (PyErr_Occurred()) throw PythonError();
    }
    const auto [start, end, limit, buffers] = numbers;
    if (end > memory.size() || start > end) return PyErr_SetString(PyExc_IndexError, "outside of the memory"), nullptr;
    return PyLong_FromSize_t(cut_frames(arguments[0], arguments[1], {memory.data(), end}, start, limit, buffers));
  });
}

// join_frame(kind, number, body, buffers, most) -> bytes
PyObject* join(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 5)) return nullptr;
  return guarded([&]() -> PyObject* {
    const long kind = PyLong_AsLong(arguments[0]);
    const unsigned long long number = PyLong_AsUnsignedLongLong(arguments[1]);
    const size_t most = PyLong_AsSize_t(arguments[4]);
    if (PyErr_Occurred()) throw PythonError();
    if (kind < 0 || kind > UINT8_MAX || (!PyList_Check(arguments[3]) && !PyTuple_Check(arguments[3]))) throw NotMine();
    PyObject* made = join_frame(static_cast<uint8_t>(kind), number, arguments[2], arguments[3], most);
    if (!made) throw NotMine();
    return made;
  });
}

// record_received(tensors, positions, recv, key, message) -> tensors
PyObject* record(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 5)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (!PyList_CheckExact(arguments[0]) || !PyTuple_CheckExact(arguments[1])) throw NotMine();
    const char* message = PyUnicode_AsUTF8(arguments[4]);
    if (!message) throw PythonError();
    return record_received(arguments[0], arguments[1], arguments[2], arguments[3], message).release();
  });
}

PyMethodDef functions[] = {
    {"set_callbacks", fast(set_callbacks), METH_FASTCALL, nullptr},
    {"encode", fast(encode), METH_FASTCALL, nullptr},
    {"read_payload", fast(read_payload), METH_FASTCALL, nullptr},
    {"cut_frames", fast(cut), METH_FASTCALL, nullptr},
    {"join_frame", fast(join), METH_FASTCALL, nullptr},
    {"record_received", fast(record), METH_FASTCALL, nullptr},
    {},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "backhaul_core", "The straight line of a message, see `backhaul._native`.", -1, functions,
};

}  // namespace
}  // namespace backhaul

PyMODINIT_FUNC PyInit_backhaul_core() {
  using namespace backhaul;
  if (PyType_Ready(&TensorMemory::type) || PyType_Ready(&IncomingPayload::type)) return nullptr;
  ordinary_keys();
  Object module(PyModule_Create(&definition));
  return add_autograd(module.get()) ? module.release() : nullptr;
}
