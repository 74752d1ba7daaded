// The functions of autograd that Python calls. They return None for what they do not do.
#pragma once

#include "engine_run.h"
#include "values.h"

namespace backhaul {

// record_sent(index, tensors, copies) -> (places of those that require grad, source, on the host); () if none does
inline Object record_sent(PyObject* index, PyObject* tensors, PyObject* copies) {
  if (!Box<SourceIndex>::holds(index) || !is_sequence(tensors) || !PyAnySet_Check(copies))
    raise(PyExc_TypeError, "record_sent needs an index, a list and a set");
  Sent sent(tensors, copies);
  if (sent.edges.empty()) return Object(PyTuple_New(0));
  const Object numbers = list_of(sent.places.size(), [&](size_t i) { return Object(PyLong_FromSize_t(sent.places[i])); });
  const Object places(PyList_AsTuple(numbers.get())), source = Box<Source>::make(index, std::move(sent.edges));
  return Object(PyTuple_Pack(3, places.get(), source.get(), sent.on_host ? Py_True : Py_False));
}

// record_message(index, records, pending, make, context, to, tensors, copies, place, new_message, message, replied)
//   -> note
// Keeps the record of an outgoing message. The note is encoded as msgspec encodes an `AutogradNote`.
inline Object record_message(PyObject* index, PyObject* records, PyObject* pending, PyObject* make, PyObject* context,
                             PyObject* to, PyObject* tensors, PyObject* copies, PyObject* place, PyObject* new_message,
                             PyObject* message, PyObject* replied) {
  if (!Box<SourceIndex>::holds(index) || !PyDict_CheckExact(records) || !is_sequence(tensors) ||
      !PyAnySet_Check(copies) || !PyTuple_CheckExact(place))
    throw NotMine();
  Sent sent(tensors, copies);
  if (!sent.on_host) throw NotMine();
  Writer note;
  note.array(7);
  note.integer(integer_of(context));
  if (sent.edges.empty()) {
    note.natural(0);
  } else {
    const Object id = integer_of(message) ? Object::borrowed(message) : Object(PyObject_CallNoArgs(new_message));
    const Object source = Box<Source>::make(index, std::move(sent.edges));
    PyObject* fields[] = {id.get(), to, place, source.get(), Py_None, Py_None, Py_None, replied};
    const Object record(PyObject_Vectorcall(make, fields, 8, nullptr));
    note.natural(static_cast<uint64_t>(integer_of(id.get())));
    set_item(records, id.get(), record.get());
    if (pending != Py_None) set_item(pending, id.get(), Py_True);
  }
  note.array(sent.places.size());
  for (const size_t each : sent.places) note.natural(each);
  note.array(size_of(place));
  for (size_t i = 0; i < size_of(place); ++i) note.integer(integer_of(item_of(place, i)));
  note.integer(-1);  // no replay
  note.natural(0);
  note.natural(0);
  return from_bytes(note.bytes);
}

// run_sources(index, records, sources, counts, gradients, retain, most_nodes, send, forget, runs)
//   -> (gradients of leaves, whether hooks must see them, answers, produced messages with their workers)
inline Object run_sources(PyObject* index, PyObject* records, PyObject* sources, PyObject* counts, PyObject* grads,
                          PyObject* retain, PyObject* most_nodes, PyObject* send, PyObject* forget, PyObject* runs) {
  if (!PyDict_CheckExact(records) || !PyList_CheckExact(sources) || !PyList_CheckExact(counts) ||
      !PyList_CheckExact(grads) || size_of(sources) != size_of(counts))
    throw NotMine();
  EngineRun run(unbox<SourceIndex>(index), records, sources, counts, grads, integer_of(most_nodes), send,
                forget == Py_True);
  return run(retain == Py_True, runs);
}

// claim(recvs, retain, spent) -> the first message outside contexts that is spent already, or None. Marks the others as
// spent unless `retain`, and adds (weak reference, sender, message) of each to `spent`; as `LocalPass.spend`.
inline Object claim(PyObject* recvs, PyObject* retain, PyObject* spent) {
  static PyObject *name = interned("spent"), *sender = interned("sender"), *message = interned("message");
  if (!PyList_CheckExact(recvs) || !PyList_CheckExact(spent)) raise(PyExc_TypeError, "claim needs lists");
  for (size_t i = 0; i < size_of(recvs); ++i) {
    PyObject* recv = item_of(recvs, i);
    if (!is_plain(recv)) continue;
    const Object before(PyObject_GetAttr(recv, name));
    if (before.get() == Py_True) return Object::borrowed(recv);
    if (retain == Py_True) continue;
    const Object from(PyObject_GetAttr(recv, sender)), id(PyObject_GetAttr(recv, message));
    const Object weak(PyWeakref_NewRef(recv, nullptr)), item(PyTuple_Pack(3, weak.get(), from.get(), id.get()));
    if (PyObject_SetAttr(recv, name, Py_True)) throw PythonError();
    append(spent, item.get());
  }
  return none();
}

// read_gradients(body, buffers) -> the gradients of a payload, none of which requires grad
inline Object read_gradients(PyObject* body, PyObject* buffers) {
  if (!is_sequence(buffers)) throw NotMine();
  const View bytes(body);
  Reader in(bytes.bytes());
  const Payload payload(in, buffers);
  if (in.left() || payload.requires_grad()) throw NotMine();
  return payload.values(payload.tensors(), Py_None);
}

}  // namespace backhaul
