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

  explicit Outgoing(EncodedValues encoded) : values(std::move(encoded)) {}

  Object get_tensors() {
    const auto& found = values.tensors;
    if (!tensors) tensors = list_of(found.size(), [&](size_t i) { return Object::borrowed(found[i].get()); });
    return Object::borrowed(tensors.get());
  }

  // The positions of the tensors that require grad.
  Object get_recorded() {
    if (!recorded) {
      const Object list(PyList_New(0));
      for (size_t i = 0; i < values.tensors.size(); ++i)
        if (THPVariable_Unpack(values.tensors[i].get()).requires_grad())
          append(list.get(), Object(PyLong_FromSize_t(i)).get());
      recorded = Object(PyList_AsTuple(list.get()));
    }
    return Object::borrowed(recorded.get());
  }

  // The payload and the buffers, for the twins in Python.
  Object get_payload() { return Object(PyObject_CallOneArg(raw, from_bytes(values.payload).get())); }
  Object get_buffers() { return values.buffers(); }

  Object get_parcels() { return Object::borrowed(values.parcels.get()); }
  Object get_none() { return none(); }
  Object get_empty() { return Object(PyTuple_New(0)); }
  Object get_empty_set() { return Object(PyFrozenSet_New(nullptr)); }
};

inline PyGetSetDef outgoing_attributes[] = {
    attribute<&Outgoing::get_payload>("payload"),
    attribute<&Outgoing::get_buffers>("buffers"),
    attribute<&Outgoing::get_none>("keep"),
    attribute<&Outgoing::get_tensors>("tensors"),
    attribute<&Outgoing::get_recorded>("recorded"),
    attribute<&Outgoing::get_parcels>("parcels"),
    attribute<&Outgoing::get_none>("lease"),
    attribute<&Outgoing::get_empty>("unrecorded"),
    attribute<&Outgoing::get_empty_set>("copies"),
    {},
};
inline PyMethodDef outgoing_methods[] = {
    method<&Outgoing::get_none>("discard", "The values are not going to be sent."),
    {},
};
inline PyTypeObject Outgoing::type = boxed_type<Outgoing>(
    "backhaul.Outgoing", "The encoded values of a call or of its result.", outgoing_methods, outgoing_attributes);

// encode_values(values, names, main_shared, plain, link, apart) -> Outgoing. Throws `NotMine` for values that Python has
// to encode.
inline Object encode_values(PyObject* values, PyObject*, PyObject* main_shared, PyObject* plain, PyObject* link,
                            PyObject* apart) {
  static PyObject* const takes_host = interned("takes_host");
  if (plain != Py_False) throw NotMine();
  if (link != Py_None && Object(PyObject_GetAttr(link, takes_host)).get() != Py_False) throw NotMine();
  std::vector<Object> each;  // a callback may change a list
  if (!PyTuple_CheckExact(values) && !PyList_CheckExact(values)) throw NotMine();
  for (size_t i = 0; i < size_of(values); ++i) each.push_back(Object::borrowed(item_of(values, i)));
  return Box<Outgoing>::make(ValueWriter(main_shared == Py_True, apart == Py_True).write(each));
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
  std::vector<std::string_view> memory;
  for (const Span& span : values.spans) memory.emplace_back(span.data, span.size);
  const FrameWriter writer(kind, size_in(number), message, memory);
  const bool whole = writer.small();
  const Object buffers = values.buffers();
  const Object pieces(PyTuple_New(whole ? 1 : 0));
  if (whole) PyTuple_SET_ITEM(pieces.get(), 0, writer.join().release());
  const Object code(PyLong_FromLong(kind)), body = from_bytes(message);
  PyObject* arguments[] = {code.get(), number, body.get(), buffers.get(), Py_None, pieces.get()};
  return Object(PyObject_Vectorcall(frame_type, arguments, 6, nullptr));
}

// request_frame(number, function, encoded, keywords, notes, left) -> Frame
inline Object request_frame(PyObject* number, PyObject* function, PyObject* encoded, PyObject* keywords,
                            PyObject* notes, PyObject* left) {
  const EncodedValues& values = unbox<Outgoing>(encoded).values;
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

// reply_frame(number, encoded, notes) -> Frame
inline Object reply_frame(PyObject* number, PyObject* encoded, PyObject* notes) {
  const EncodedValues& values = unbox<Outgoing>(encoded).values;
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
      set_item(notes.get(), owner.get(), note.get());
    }
    if (kind == REQUEST) left = in.peek() == 0xcb ? in.real() : static_cast<double>(in.natural());
    if (in.left() || (kind == REPLY && payload->value_count() != 1)) throw NotMine();
  }

  Object get_function() { return Object::borrowed(function.get()); }
  Object get_notes() { return Object::borrowed(notes.get()); }
  Object get_keywords() { return boolean(keywords); }
  Object get_left() { return Object(PyFloat_FromDouble(left)); }
  Object get_requires_grad() { return boolean(payload->requires_grad()); }

  Object tensors(PyObject*) { return Object::borrowed(payload->tensors()); }
  Object values(PyObject* tensors, PyObject* worker) { return payload->values(tensors, worker); }
  Object decline(PyObject*) { return none(); }

  Object value(PyObject* tensors, PyObject* worker) {
    const Object list = payload->values(tensors, worker);
    if (size_of(list.get()) == 1) return Object::borrowed(item_of(list.get(), 0));
    PyErr_Format(PyExc_ValueError, "the message has %zu values, not one", size_of(list.get()));
    throw PythonError();
  }
};

inline PyGetSetDef received_attributes[] = {
    attribute<&Received::get_function>("function"),
    attribute<&Received::get_keywords>("keywords"),
    attribute<&Received::get_notes>("notes"),
    attribute<&Received::get_left>("left"),
    attribute<&Received::get_requires_grad>("requires_grad"),
    {},
};
inline PyMethodDef received_methods[] = {
    method<&Received::tensors>("tensors", "The tensors of the message."),
    method<&Received::values>("values", "The values, with these tensors, for a worker."),
    method<&Received::value>("value", "The only value."),
    method<&Received::decline>("decline", "Nobody reads the message; it has no slots to give back."),
    {},
};
inline PyTypeObject Received::type = boxed_type<Received>(
    "backhaul.Received", "The values of a message that has arrived.", received_methods, received_attributes);

// read_request(frame) and read_reply(frame) -> Received
template <Kind kind>
Object read_message(PyObject* frame) {
  static PyObject *const body = interned("body"), *const buffers = interned("buffers");
  const Object message(PyObject_GetAttr(frame, body)), memory(PyObject_GetAttr(frame, buffers));
  return Box<Received>::make(kind, message.get(), memory.get());
}

// read_values(payload, buffers) -> Received
inline Object read_values(PyObject* payload, PyObject* buffers) {
  return Box<Received>::make(VALUES, payload, buffers);
}

}  // namespace backhaul
