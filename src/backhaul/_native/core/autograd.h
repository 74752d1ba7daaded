// The functions of autograd that Python calls; as in `module.cpp`.
#pragma once

#include <array>

#include "engine_run.h"
#include "guarded.h"
#include "values.h"

namespace backhaul {

// set_names(mark, plain_recv, gradient_edge)
inline PyObject* set_names(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 3)) return nullptr;
  names = {Py_NewRef(arguments[0]), Py_NewRef(arguments[1]), Py_NewRef(arguments[2])};
  Py_RETURN_NONE;
}

// record_sent(index, tensors, copies) -> (places of those that require grad, source, on the host); () if none does
inline PyObject* record_sent(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 3)) return nullptr;
  return or_none([&]() -> PyObject* {
    const bool listed = PyList_Check(arguments[1]) || PyTuple_Check(arguments[1]);
    if (Py_TYPE(arguments[0]) != &SourceIndex::type || !listed || !PyAnySet_Check(arguments[2])) {
      PyErr_SetString(PyExc_TypeError, "record_sent needs an index, a list and a set");
      return nullptr;
    }
    HANDLE_TH_ERRORS
    Sent sent(arguments[1], arguments[2]);
    if (sent.edges.empty()) return PyTuple_New(0);
    Object numbers(PyTuple_New(static_cast<Py_ssize_t>(sent.places.size())));
    for (size_t i = 0; i < sent.places.size(); ++i)
      PyTuple_SET_ITEM(numbers.get(), static_cast<Py_ssize_t>(i), Object(PyLong_FromSsize_t(sent.places[i])).release());
    const Object source(Source::make(SourceIndex::of(arguments[0]), std::move(sent.edges)));
    return PyTuple_Pack(3, numbers.get(), source.get(), sent.on_host ? Py_True : Py_False);
    END_HANDLE_TH_ERRORS
  });
}

// What `record_message` needs besides the message.
struct SendArguments {
  PyObject *index, *records, *pending, *make, *context, *to, *tensors, *copies, *place, *new_message, *message, *replied;
};

inline int64_t integer_of(PyObject* object) {
  const long long number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred()) throw PythonError();
  return number;
}

// Keeps the record of an outgoing message. Returns its note, as msgspec encodes an `AutogradNote`.
inline PyObject* write_note(const SendArguments& given) {
  Sent sent(given.tensors, given.copies);
  if (!sent.on_host) throw NotMine();
  Writer note;
  note.array(7);
  note.integer(integer_of(given.context));
  if (sent.edges.empty()) {
    note.natural(0);
  } else {
    const Object id = PyLong_AsLongLong(given.message) ? Object::borrowed(given.message)
                                                       : Object(PyObject_CallNoArgs(given.new_message));
    const Object source(Source::make(SourceIndex::of(given.index), std::move(sent.edges)));
    PyObject* fields[] = {id.get(), given.to, given.place, source.get(), Py_None, Py_None, Py_None, given.replied};
    const Object record(PyObject_Vectorcall(given.make, fields, 8, nullptr));
    note.natural(static_cast<uint64_t>(integer_of(id.get())));
    if (PyDict_SetItem(given.records, id.get(), record.get())) throw PythonError();
    if (given.pending != Py_None && PyDict_SetItem(given.pending, id.get(), Py_True)) throw PythonError();
  }
  note.array(sent.places.size());
  for (const Py_ssize_t place : sent.places) note.natural(static_cast<uint64_t>(place));
  note.array(static_cast<size_t>(PyTuple_GET_SIZE(given.place)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given.place); ++i)
    note.integer(integer_of(PyTuple_GET_ITEM(given.place, i)));
  note.integer(-1);  // no replay
  note.natural(0);
  note.natural(0);
  return PyBytes_FromStringAndSize(note.bytes.data(), static_cast<Py_ssize_t>(note.bytes.size()));
}

// record_message(index, records, pending, make, context, to, tensors, copies, place, new_message, message, replied)
//   -> note
inline PyObject* record_message(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (!expect(count, 12)) return nullptr;
  return or_none([&]() -> PyObject* {
    const SendArguments given{a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]};
    const bool listed = PyList_Check(given.tensors) || PyTuple_Check(given.tensors);
    if (Py_TYPE(given.index) != &SourceIndex::type || !PyDict_CheckExact(given.records) || !listed ||
        !PyAnySet_Check(given.copies) || !PyTuple_CheckExact(given.place))
      throw NotMine();
    HANDLE_TH_ERRORS
    try {
      return write_note(given);
    } catch (const NotMine&) {
      Py_RETURN_NONE;
    }
    END_HANDLE_TH_ERRORS
  });
}

// received_behind(roots) -> [recv, ...]
inline PyObject* find_received(PyObject*, PyObject* roots) {
  return or_none([&]() -> PyObject* {
    if (!PyTuple_Check(roots) && !PyList_Check(roots)) throw NotMine();
    return received_behind(roots).release();
  });
}

// run_sources(index, records, sources, counts, gradients, retain, most_nodes, send, forget, runs)
//   -> (gradients of leaves, whether hooks must see them, answers, produced messages with their workers)
inline PyObject* run_sources(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 10)) return nullptr;
  return or_none([&]() -> PyObject* {
    const auto [index, records, sources, counts, grads, retain, nodes, send, forget, runs] =
        std::array<PyObject*, 10>{arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                                  arguments[5], arguments[6], arguments[7], arguments[8], arguments[9]};
    if (Py_TYPE(index) != &SourceIndex::type || !PyDict_CheckExact(records) || !PyList_CheckExact(sources) ||
        !PyList_CheckExact(counts) || !PyList_CheckExact(grads) || PyList_GET_SIZE(sources) != PyList_GET_SIZE(counts))
      throw NotMine();
    const Py_ssize_t most = PyLong_AsSsize_t(nodes);
    if (most == -1 && PyErr_Occurred()) throw PythonError();
    EngineRun run(SourceIndex::of(index), records, sources, counts, grads, most, send, forget == Py_True);
    HANDLE_TH_ERRORS
    return run(retain == Py_True, runs).release();
    END_HANDLE_TH_ERRORS
  });
}

// claim(recvs, retain, spent) -> the first message outside contexts that is spent already, or None. Marks the others as
// spent unless `retain`, and adds (weak reference, sender, message) of each to `spent`; as `LocalPass.spend`.
inline PyObject* claim(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 3)) return nullptr;
  static PyObject *spent = interned("spent"), *sender = interned("sender"), *message = interned("message");
  return or_none([&]() -> PyObject* {
    if (!PyList_CheckExact(arguments[0]) || !PyList_CheckExact(arguments[2]))
      return PyErr_SetString(PyExc_TypeError, "claim needs lists"), nullptr;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[0]); ++i) {
      PyObject* recv = PyList_GET_ITEM(arguments[0], i);
      if (reinterpret_cast<PyObject*>(Py_TYPE(recv)) != names.plain_recv) continue;
      const Object before(PyObject_GetAttr(recv, spent));
      if (before.get() == Py_True) return Py_NewRef(recv);
      if (arguments[1] == Py_True) continue;
      const Object from(PyObject_GetAttr(recv, sender)), id(PyObject_GetAttr(recv, message));
      const Object weak(PyWeakref_NewRef(recv, nullptr)), item(PyTuple_Pack(3, weak.get(), from.get(), id.get()));
      if (PyObject_SetAttr(recv, spent, Py_True) || PyList_Append(arguments[2], item.get())) throw PythonError();
    }
    Py_RETURN_NONE;
  });
}

// read_gradients(body, buffers) -> the gradients of a payload, none of which requires grad
inline PyObject* read_gradients(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 2)) return nullptr;
  return or_none([&]() -> PyObject* {
    if (!PyList_Check(arguments[1]) && !PyTuple_Check(arguments[1])) throw NotMine();
    const View body(arguments[0]);
    Reader in(body.bytes());
    const Payload payload(in, arguments[1]);
    if (in.left() || payload.requires_grad()) throw NotMine();
    return payload.values(payload.tensors(), Py_None).release();
  });
}

inline PyMethodDef autograd_functions[] = {
    {"set_names", fast(set_names), METH_FASTCALL, nullptr},
    {"record_sent", fast(record_sent), METH_FASTCALL, nullptr},
    {"record_message", fast(record_message), METH_FASTCALL, nullptr},
    {"received_behind", find_received, METH_O, nullptr},
    {"run_sources", fast(run_sources), METH_FASTCALL, nullptr},
    {"claim", fast(claim), METH_FASTCALL, nullptr},
    {"read_gradients", fast(read_gradients), METH_FASTCALL, nullptr},
    {},
};

// Adds what autograd needs to the module.
inline bool add_autograd(PyObject* module) {
  if (PyType_Ready(&SourceIndex::type) || PyType_Ready(&Source::type) || PyType_Ready(&LeafGradients::type)) return false;
  return !PyModule_AddFunctions(module, autograd_functions) &&
         !PyModule_AddObjectRef(module, "SourceIndex", reinterpret_cast<PyObject*>(&SourceIndex::type));
}

}  // namespace backhaul
