// The functions that Python calls. `connect` comes first: it names their twins in Python, see `_wire/call_frames.py`.
#include "autograd.h"
#include "calls.h"
#include "frames.h"
#include "graph.h"
#include "spin.h"
#include "values.h"

namespace backhaul {
namespace {

// The functions in Python that do what this core does not.
struct Twins {
  PyObject *encode_values, *request_frame, *reply_frame, *read_request, *read_reply, *read_values;
} twins;

// set_frame(Frame): the type of frames
PyObject* set_frame(PyObject*, PyObject* type) {
  frame_type = Py_NewRef(type);  // for good, as all below
  Py_RETURN_NONE;
}

// connect(*, take_apart, put_together, immutable, raw, and the twins)
PyObject* connect(PyObject*, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"take_apart",  "put_together", "immutable",  "raw",         "encode_values", "request_frame",
                                "reply_frame", "read_request", "read_reply", "read_values", nullptr};
  PyObject* given[10];
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "$OOOOOOOOOO", const_cast<char**>(names), &given[0], &given[1],
                                   &given[2], &given[3], &given[4], &given[5], &given[6], &given[7], &given[8],
                                   &given[9]))
    return nullptr;
  for (PyObject* each : given) Py_INCREF(each);
  callbacks = {given[0], given[1], given[2]};
  Outgoing::raw = given[3];
  twins = {given[4], given[5], given[6], given[7], given[8], given[9]};
  Py_RETURN_NONE;
}

// encode_values(values, names, main_shared, plain, link, apart=False) -> Outgoing, or Encoded
PyObject* encode_values(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 5 && !expect(count, 6)) return nullptr;
  return guarded(twins.encode_values, given, count, [&] {
    static PyObject* const takes_host = PyUnicode_InternFromString("takes_host");
    if (given[3] != Py_False) throw NotMine();
    if (given[4] != Py_None && Object(PyObject_GetAttr(given[4], takes_host)).get() != Py_False) throw NotMine();
    return backhaul::encode_values(given[0], given[2] == Py_True, count == 6 && given[5] == Py_True);
  });
}

// request_frame(number, function, encoded, keywords, notes, left) -> Frame
PyObject* request_frame(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!expect(count, 6)) return nullptr;
  return guarded(twins.request_frame, given, count,
                 [&] { return backhaul::request_frame(given[0], given[1], given[2], given[3], given[4], given[5]); });
}

// reply_frame(number, encoded, notes) -> Frame
PyObject* reply_frame(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!expect(count, 3)) return nullptr;
  return guarded(twins.reply_frame, given, count, [&] { return backhaul::reply_frame(given[0], given[1], given[2]); });
}

// read_request(frame) -> Received, or RequestReader
PyObject* read_request(PyObject*, PyObject* frame) {
  return guarded(twins.read_request, &frame, 1, [&] { return read_message(REQUEST, frame); });
}

// read_reply(frame) -> Received, or ValueReader
PyObject* read_reply(PyObject*, PyObject* frame) {
  return guarded(twins.read_reply, &frame, 1, [&] { return read_message(REPLY, frame); });
}

// read_values(payload, buffers) -> Received, or ValueReader
PyObject* read_values(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!expect(count, 2)) return nullptr;
  return guarded(twins.read_values, given, count, [&] { return Received::Boxed::make(VALUES, given[0], given[1]); });
}

// cut_frames(frames, memory, start, end, limit, most_buffers) -> new start
PyObject* cut_frames(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!expect(count, 6)) return nullptr;
  return guarded([&] {
    const View memory(given[1]);
    size_t numbers[4];
    for (int i = 0; i < 4; ++i) {
      numbers[i] = PyLong_AsSize_t(given[2 + i]);
      if (PyErr_Occurred()) throw PythonError();
    }
    const auto [start, end, limit, buffers] = numbers;
    if (!PyList_CheckExact(given[0]) || end > memory.size() || start > end || !frame_type) throw NotMine();
    return Object(PyLong_FromSize_t(backhaul::cut_frames(given[0], {memory.data(), end}, start, limit, buffers)));
  });
}

// join_frame(kind, number, body, buffers) -> bytes, or None
PyObject* join_frame(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!expect(count, 4)) return nullptr;
  return guarded([&] {
    const long kind = PyLong_AsLong(given[0]);
    const unsigned long long number = PyLong_AsUnsignedLongLong(given[1]);
    if (PyErr_Occurred()) throw PythonError();
    if (kind < 0 || kind > UINT8_MAX || !is_sequence(given[3])) throw NotMine();
    Object joined = backhaul::join_frame(static_cast<uint8_t>(kind), number, given[2], given[3]);
    return joined ? std::move(joined) : Object::borrowed(Py_None);
  });
}

// record_received(tensors, positions, recv, key, message) -> tensors, or None
PyObject* record_received(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (!expect(count, 5)) return nullptr;
  return guarded([&] {
    if (!PyList_CheckExact(given[0]) || !PyTuple_CheckExact(given[1])) return Object::borrowed(Py_None);
    const char* message = PyUnicode_AsUTF8(given[4]);
    if (!message) throw PythonError();
    try {
      return backhaul::record_received(given[0], given[1], given[2], given[3], message);
    } catch (const NotMine&) {
      return Object::borrowed(Py_None);
    }
  });
}

PyMethodDef functions[] = {
    {"set_frame", set_frame, METH_O, nullptr},
    {"connect", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(connect)), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"encode_values", fast(encode_values), METH_FASTCALL, nullptr},
    {"request_frame", fast(request_frame), METH_FASTCALL, nullptr},
    {"reply_frame", fast(reply_frame), METH_FASTCALL, nullptr},
    {"read_request", read_request, METH_O, nullptr},
    {"read_reply", read_reply, METH_O, nullptr},
    {"read_values", fast(read_values), METH_FASTCALL, nullptr},
    {"cut_frames", fast(cut_frames), METH_FASTCALL, nullptr},
    {"join_frame", fast(join_frame), METH_FASTCALL, nullptr},
    {"record_received", fast(record_received), METH_FASTCALL, nullptr},
    {"spin", fast(spin_without_interpreter), METH_FASTCALL, nullptr},
    {},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "backhaul_core", "The straight line of a message, see `backhaul._native`.", -1, functions,
};

}  // namespace
}  // namespace backhaul

PyMODINIT_FUNC PyInit_backhaul_core() {
  using namespace backhaul;
  if (PyType_Ready(&TensorMemory::type) || PyType_Ready(&Outgoing::type) || PyType_Ready(&Received::type))
    return nullptr;
  Object module(PyModule_Create(&definition));
  return add_autograd(module.get()) ? module.release() : nullptr;
}
