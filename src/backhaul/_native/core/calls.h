// Requests and replies <-> frames, as `_wire/call_frames.py` describes them: what its functions do, in one call each.
#pragma once

#include <optional>

#include "frames.h"
#include "values.h"

namespace backhaul {

enum Kind : uint8_t { VALUES = 0, REQUEST = 3, REPLY = 4 };  // as in `_wire/messages.py`; VALUES: no message around

// The encoded values of a call or of its result; to Python, what `_wire/codec.py` calls `Encoded`.
struct Outgoing {
  EncodedValues values;
  Object tensors, recorded;  // made when they are asked for

  static PyTypeObject type;
  static inline PyObject* raw = nullptr;  // msgspec.Raw
  using Boxed = Box<Outgoing>;

  explicit Outgoing(EncodedValues encoded) : values(std::move(encoded)) {}

  static PyObject* get_tensors(PyObject* self, void*) {
    return guarded([&] {
      Outgoing& held = Boxed::of(self);
      if (!held.tensors) {
        const auto& found = held.values.tensors;
        Object list(PyList_New(static_cast<Py_ssize_t>(found.size())));
        for (size_t i = 0; i < found.size(); ++i) put(list.get(), i, Object::borrowed(found[i].get()));
        held.tensors = std::move(list);
      }
      return Object::borrowed(held.tensors.get());
    });
  }

  // The positions of the tensors that require grad.
  static PyObject* get_recorded(PyObject* self, void*) {
    return guarded([&] {
      Outgoing& held = Boxed::of(self);
      if (!held.recorded) {
        const Object list(PyList_New(0));
        for (size_t i = 0; i < held.values.tensors.size(); ++i)
          if (THPVariable_Unpack(held.values.tensors[i].get()).requires_grad())
            if (PyList_Append(list.get(), Object(PyLong_FromSize_t(i)).get())) throw PythonError();
        held.recorded = Object(PyList_AsTuple(list.get()));
      }
      return Object::borrowed(held.recorded.get());
    });
  }

  // The payload and the buffers, for the twins in Python.
  static PyObject* get_payload(PyObject* self, void*) {
    return guarded([&] {
      const Object bytes = from_bytes(Boxed::of(self).values.payload);
      return Object(PyObject_CallOneArg(raw, bytes.get()));
    });
  }

  static PyObject* get_buffers(PyObject* self, void*) {
    return guarded([&] {
      const EncodedValues& values = Boxed::of(self).values;
      Object list(PyList_New(static_cast<Py_ssize_t>(values.tensors.size())));
      for (size_t i = 0; i < values.tensors.size(); ++i) put(list.get(), i, values.memory(i));
      return list;
    });
  }

  static PyObject* get_parcels(PyObject* self, void*) { return Py_NewRef(Boxed::of(self).values.parcels.get()); }
  static PyObject* get_none(PyObject*, void*) { Py_RETURN_NONE; }
  static PyObject* get_empty(PyObject*, void*) { return PyTuple_New(0); }
  static PyObject* get_empty_set(PyObject*, void*) { return PyFrozenSet_New(nullptr); }
  static PyObject* discard(PyObject*, PyObject*) { Py_RETURN_NONE; }
};

inline PyGetSetDef outgoing_attributes[] = {
    {"payload", Outgoing::get_payload, nullptr, nullptr, nullptr},
    {"buffers", Outgoing::get_buffers, nullptr, nullptr, nullptr},
    {"keep", Outgoing::get_none, nullptr, nullptr, nullptr},
    {"tensors", Outgoing::get_tensors, nullptr, nullptr, nullptr},
    {"recorded", Outgoing::get_recorded, nullptr, nullptr, nullptr},
    {"parcels", Outgoing::get_parcels, nullptr, nullptr, nullptr},
    {"lease", Outgoing::get_none, nullptr, nullptr, nullptr},
    {"unrecorded", Outgoing::get_empty, nullptr, nullptr, nullptr},
    {"copies", Outgoing::get_empty_set, nullptr, nullptr, nullptr},
    {},
};
inline PyMethodDef outgoing_methods[] = {
    {"discard", Outgoing::discard, METH_NOARGS, "The values are not going to be sent."},
    {},
};
inline PyTypeObject Outgoing::type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0)  //
    .tp_name = "backhaul.Outgoing",
    .tp_basicsize = sizeof(Box<Outgoing>),
    .tp_dealloc = Box<Outgoing>::dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The encoded values of a call or of its result.",
    .tp_methods = outgoing_methods,
    .tp_getset = outgoing_attributes,
};

// Encodes the values of a call. Throws `NotMine` for values that Python has to encode.
inline Object encode_values(PyObject* values, bool main_shared, bool apart) {
  std::vector<Object> each;  // a callback may change a list
  if (!PyTuple_CheckExact(values) && !PyList_CheckExact(values)) throw NotMine();
  for (size_t i = 0; i < size_of(values); ++i) each.push_back(Object::borrowed(item_of(values, i)));
  return Outgoing::Boxed::make(ValueWriter(main_shared, apart).write(each));
}

inline void write_notes(Writer& out, PyObject* notes) {
  if (!PyDict_CheckExact(notes)) throw NotMine();
  out.map(static_cast<size_t>(PyDict_GET_SIZE(notes)));
  PyObject *owner, *note;
  Py_ssize_t at = 0;
  while (PyDict_Next(notes, &at, &owner, &note)) {
    if (!PyBytes_CheckExact(note)) throw NotMine();
    out.text(ascii(owner));
    out.binary({PyBytes_AS_STRING(note), static_cast<size_t>(PyBytes_GET_SIZE(note))});
  }
}

// The frame of a message with these values. With small tensors it has its wire form already.
inline Object make_frame(Kind kind, PyObject* number, std::string_view message, const EncodedValues& values) {
  const unsigned long long call = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) throw PythonError();
  std::vector<std::string_view> memory;
  for (const Span& span : values.spans) memory.emplace_back(span.data, span.size);
  const FrameWriter writer(kind, call, message, memory);
  const bool whole = writer.small();
  Object buffers(PyList_New(static_cast<Py_ssize_t>(values.spans.size())));
  Object pieces(PyTuple_New(whole ? 1 : 0));
  if (whole) PyTuple_SET_ITEM(pieces.get(), 0, writer.join().release());
  for (size_t i = 0; i < values.spans.size(); ++i) put(buffers.get(), i, values.memory(i));
  const Object code(PyLong_FromLong(kind)), body = from_bytes(message);
  PyObject* arguments[] = {code.get(), number, body.get(), buffers.get(), Py_None, pieces.get()};
  return Object(PyObject_Vectorcall(frame_type, arguments, 6, nullptr));
}

// Throws `NotMine` if Python has encoded the values.
inline const EncodedValues& encoded_by_core(PyObject* encoded) {
  if (Py_TYPE(encoded) != &Outgoing::type) throw NotMine();
  return Outgoing::Boxed::of(encoded).values;
}

inline Object request_frame(PyObject* number, PyObject* function, PyObject* encoded, PyObject* keywords,
                            PyObject* notes, PyObject* left) {
  const EncodedValues& values = encoded_by_core(encoded);
  if (!PyBool_Check(keywords) || (!PyFloat_CheckExact(left) && !PyLong_CheckExact(left))) throw NotMine();
  Writer out;
  out.array(5);
  out.text(ascii(function));
  out.raw(values.payload);
  out.boolean(keywords == Py_True);
  write_notes(out, notes);
  write_scalar(out, left);
  return make_frame(REQUEST, number, out.bytes, values);
}

inline Object reply_frame(PyObject* number, PyObject* encoded, PyObject* notes) {
  const EncodedValues& values = encoded_by_core(encoded);
  Writer out;
  out.array(2);
  out.raw(values.payload);
  write_notes(out, notes);
  return make_frame(REPLY, number, out.bytes, values);
}

// A request or a reply that has arrived; to Python, what `_wire/call_frames.py` calls `ReceivedRequest` and
// `ReceivedReply`.
struct Received {
  View body;
  Object function, notes;
  bool keywords = false;
  double left = 0;
  std::optional<Payload> payload;

  static PyTypeObject type;
  using Boxed = Box<Received>;

  // Throws `NotMine` unless `message` is of this kind and has the usual form.
  Received(Kind kind, PyObject* message, PyObject* buffers) : body(message) {
    if (!is_sequence(buffers)) throw NotMine();
    Reader in(body.bytes());
    if (kind != VALUES) in.array_of(kind == REQUEST ? 5 : 2);
    if (kind == REQUEST) function = from_ascii(in.text());
    payload.emplace(in, buffers);
    if (kind == REQUEST) keywords = in.boolean();
    notes = Object(PyDict_New());
    for (size_t count = kind == VALUES ? 0 : in.map(); count; --count) {
      const Object owner = from_ascii(in.text()), note = from_bytes(in.binary());
      if (PyDict_SetItem(notes.get(), owner.get(), note.get())) throw PythonError();
    }
    if (kind == REQUEST) left = in.peek() == 0xcb ? in.real() : static_cast<double>(in.natural());
    if (in.left() || (kind == REPLY && payload->value_count() != 1)) throw NotMine();
  }

  static PyObject* get_function(PyObject* self, void*) { return Py_NewRef(Boxed::of(self).function.get()); }
  static PyObject* get_notes(PyObject* self, void*) { return Py_NewRef(Boxed::of(self).notes.get()); }
  static PyObject* get_keywords(PyObject* self, void*) { return PyBool_FromLong(Boxed::of(self).keywords); }
  static PyObject* get_left(PyObject* self, void*) { return PyFloat_FromDouble(Boxed::of(self).left); }
  static PyObject* get_requires_grad(PyObject* self, void*) {
    return PyBool_FromLong(Boxed::of(self).payload->requires_grad());
  }

  static PyObject* tensors(PyObject* self, PyObject*) { return Py_NewRef(Boxed::of(self).payload->tensors()); }
  static PyObject* decline(PyObject*, PyObject*) { Py_RETURN_NONE; }

  static PyObject* values(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    return guarded([&] { return Boxed::of(self).payload->values(arguments[0], arguments[1]); });
  }

  static PyObject* value(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    if (!expect(count, 2)) return nullptr;
    return guarded([&] {
      const Object list = Boxed::of(self).payload->values(arguments[0], arguments[1]);
      if (size_of(list.get()) == 1) return Object::borrowed(item_of(list.get(), 0));
      PyErr_Format(PyExc_ValueError, "the message has %zu values, not one", size_of(list.get()));
      throw PythonError();
    });
  }
};

inline PyGetSetDef received_attributes[] = {
    {"function", Received::get_function, nullptr, nullptr, nullptr},
    {"keywords", Received::get_keywords, nullptr, nullptr, nullptr},
    {"notes", Received::get_notes, nullptr, nullptr, nullptr},
    {"left", Received::get_left, nullptr, nullptr, nullptr},
    {"requires_grad", Received::get_requires_grad, nullptr, nullptr, nullptr},
    {},
};
inline PyMethodDef received_methods[] = {
    {"tensors", Received::tensors, METH_O, "The tensors of the message."},
    {"values", fast(Received::values), METH_FASTCALL, "The values, with these tensors, for a worker."},
    {"value", fast(Received::value), METH_FASTCALL, "The only value."},
    {"decline", Received::decline, METH_O, "Nobody reads the message; it has no slots to give back."},
    {},
};
inline PyTypeObject Received::type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0)  //
    .tp_name = "backhaul.Received",
    .tp_basicsize = sizeof(Box<Received>),
    .tp_dealloc = Box<Received>::dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The values of a message that has arrived.",
    .tp_methods = received_methods,
    .tp_getset = received_attributes,
};

inline Object read_message(Kind kind, PyObject* frame) {
  static PyObject* const names[] = {PyUnicode_InternFromString("body"), PyUnicode_InternFromString("buffers")};
  const Object body(PyObject_GetAttr(frame, names[0])), buffers(PyObject_GetAttr(frame, names[1]));
  return Received::Boxed::make(kind, body.get(), buffers.get());
}

}  // namespace backhaul
