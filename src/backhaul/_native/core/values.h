// Values <-> payloads. The format and its limits are those of `_wire/codec.py` and `_wire/nested.py`.
#pragma once

#include <unordered_set>

#include "tensors.h"

namespace backhaul {

constexpr size_t MAX_PLAIN_VALUES = 64;    // as in `_wire/codec.py`
constexpr size_t MAX_NESTED_VALUES = 512;  // as in `_wire/nested.py`
constexpr size_t MAX_NESTED_DEPTH = 32;
constexpr size_t MAX_READ_DEPTH = 2 * MAX_NESTED_DEPTH;  // a longer recursion is left to Python
constexpr int64_t NESTED = -2;                           // as in `_wire/messages.py`
enum Tag : uint8_t { TENSOR = 0, LIST = 1, TUPLE = 2, DICT = 3 };  // as in `_wire/plain.py`

// Functions of `_wire/nested.py`: for values other than scalars, tensors, lists, tuples and dicts. They may run code of
// the user's, which may change the values, and lets other threads run.
struct Callbacks {
  PyObject* take_apart = nullptr;    // (value, main_shared, parcels) -> (tag, *items), or None
  PyObject* put_together = nullptr;  // (tag, items, worker) -> value
  PyObject* immutable = nullptr;     // the tags of values that may come twice
};
inline Callbacks callbacks;

// Writes one scalar. Returns false if the value is of another type. Throws `NotMine` for a scalar that has no form.
inline bool write_scalar(Writer& out, PyObject* value) {
  if (value == Py_None) return out.nil(), true;
  if (PyBool_Check(value)) return out.boolean(value == Py_True), true;
  if (PyFloat_CheckExact(value)) return out.real(PyFloat_AS_DOUBLE(value)), true;
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow == 0) return out.integer(number), true;
    if (overflow < 0) throw NotMine();
    const unsigned long long large = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred()) {
      PyErr_Clear();
      throw NotMine();
    }
    return out.natural(large), true;
  }
  if (PyUnicode_CheckExact(value)) return out.text(ascii(value)), true;
  if (PyBytes_CheckExact(value))
    return out.binary({PyBytes_AS_STRING(value), static_cast<size_t>(PyBytes_GET_SIZE(value))}), true;
  return false;
}

// The encoded values of one message.
struct EncodedValues {
  std::string payload;
  std::vector<Object> tensors;
  std::vector<Span> spans;  // of the tensors
  Object parcels;

  // The memory of the tensors.
  Object buffers() const {
    return list_of(spans.size(), [&](size_t i) {
      return Box<TensorMemory>::make(THPVariable_Unpack(tensors[i].get()), spans[i]);
    });
  }
};

// Encodes the values of one message. Throws `NotMine` for values that Python has to encode.
class ValueWriter {
 public:
  // `apart`: whether each tensor arrives as one of its own, also if it comes twice or shares memory with another.
  ValueWriter(bool main_shared, bool apart) : main_shared_(main_shared), apart_(apart), parcels_(PyList_New(0)) {}

  EncodedValues write(const std::vector<Object>& values) && {
    const size_t count = values.size();
    Writer plain, places;
    bool nested = count > MAX_PLAIN_VALUES;
    size_t placed = 0;
    plain.array(count);
    for (size_t i = 0; i < count && !nested; ++i) {
      PyObject* value = values[i].get();
      if (is_tensor(value)) {
        places.array(2);
        places.natural(i);
        places.natural(index_of(value));
        plain.nil();
        ++placed;
      } else if (!write_scalar(plain, value)) {
        nested = true;
      }
    }
    if (nested) {
      plain = Writer();
      places = Writer();
      placed = 0;
      tensors_.clear();
      plain.array(count);
      for (const Object& value : values) write_nested(plain, value.get(), 0);
    }
    Writer out;
    out.array(6);
    std::vector<Span> spans = write_table(out);
    out.raw(plain.bytes);
    out.array(placed);
    out.raw(places.bytes);
    out.binary({});
    out.integer(nested ? NESTED : 0);
    out.natural(0);
    return {std::move(out.bytes), std::move(tensors_), std::move(spans), std::move(parcels_)};
  }

 private:
  size_t index_of(PyObject* tensor) {
    PyObject** attributes = _PyObject_GetDictPtr(tensor);
    if (attributes && *attributes && PyDict_GET_SIZE(*attributes)) throw NotMine();
    for (size_t i = 0; i < tensors_.size() && !apart_; ++i)
      if (tensors_[i].get() == tensor) return i;
    tensors_.push_back(Object::borrowed(tensor));
    return tensors_.size() - 1;
  }

  std::vector<Span> write_table(Writer& out) const {
    std::vector<Span> spans;
    Writer records;
    for (const Object& tensor : tensors_) spans.push_back(write_tensor(records, THPVariable_Unpack(tensor.get())));
    if (!apart_ && overlap(spans)) throw NotMine();
    out.array(4);
    out.array(0);
    out.array(0);
    out.array(tensors_.size());
    out.raw(records.bytes);
    out.array(0);
    return spans;
  }

  // The caller keeps `value`.
  void write_nested(Writer& out, PyObject* value, size_t depth) {
    if (++count_ > MAX_NESTED_VALUES || depth > MAX_NESTED_DEPTH) throw NotMine();
    if (write_scalar(out, value)) return;
    if (is_tensor(value)) {
      out.array(2);
      out.natural(TENSOR);
      out.natural(index_of(value));
    } else if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
      const bool list = PyList_CheckExact(value);
      if (list) check_first(value);
      const size_t size = size_of(value);
      out.array(size + 1);
      out.natural(list ? LIST : TUPLE);
      for (size_t i = 0; i < size; ++i) {
        if (size_of(value) != size) throw NotMine();  // a callback has changed it
        const Object item = Object::borrowed(item_of(value, i));
        write_nested(out, item.get(), depth + 1);
      }
    } else if (PyDict_CheckExact(value)) {
      write_dict(out, value, depth);
    } else {
      write_taken_apart(out, value, depth);
    }
  }

  void write_dict(Writer& out, PyObject* value, size_t depth) {
    check_first(value);
    const Py_ssize_t size = PyDict_GET_SIZE(value);
    out.array(2 * static_cast<size_t>(size) + 1);
    out.natural(DICT);
    PyObject *next_key, *next_item;
    Py_ssize_t at = 0, written = 0;
    while (PyDict_Next(value, &at, &next_key, &next_item)) {
      const Object key = Object::borrowed(next_key), item = Object::borrowed(next_item);
      write_nested(out, key.get(), depth + 1);
      write_nested(out, item.get(), depth + 1);
      if (PyDict_GET_SIZE(value) != size || ++written > size) throw NotMine();  // a callback has changed it
    }
    if (written != size) throw NotMine();
  }

  void write_taken_apart(Writer& out, PyObject* value, size_t depth) {
    PyObject* arguments[] = {value, main_shared_ ? Py_True : Py_False, parcels_.get()};
    Object parts(PyObject_Vectorcall(callbacks.take_apart, arguments, 3, nullptr));
    if (!PyTuple_CheckExact(parts.get()) || !size_of(parts.get())) throw NotMine();
    const int shared = PySet_Contains(callbacks.immutable, item_of(parts.get(), 0));
    if (shared < 0) throw PythonError();
    if (!shared) check_first(value);
    const size_t size = size_of(parts.get());
    out.array(size);
    for (size_t i = 0; i < size; ++i) write_nested(out, item_of(parts.get(), i), i ? depth + 1 : depth);
    kept_.push_back(std::move(parts));
  }

  // The other end would make two objects of an object that comes twice. Pickle keeps it one.
  void check_first(PyObject* value) {
    if (!seen_.insert(value).second) throw NotMine();
  }

  const bool main_shared_, apart_;
  Object parcels_;
  std::vector<Object> tensors_;
  std::unordered_set<PyObject*> seen_;
  std::vector<Object> kept_;  // parts that exist only here: no other object may get their address
  size_t count_ = 0;
};

// The payload of a message that has arrived: its tensors, and where its values are. Refers to the bytes that it was
// made of, and to nothing else. Making it checks all of it, so that nothing is left to find out when values are made.
class Payload {
 public:
  // Reads a payload and leaves `in` behind it.
  Payload(Reader& in, PyObject* buffers) {
    in.array_of(6);
    in.array_of(4);
    in.array_of(0);
    in.array_of(0);
    tensor_count_ = in.array();
    if (size_of(buffers) != tensor_count_) throw NotMine();
    tensors_ = list_of(tensor_count_, [&](size_t i) {
      ReadTensor read = read_tensor(in.binary(), item_of(buffers, i));
      requires_grad_ |= read.requires_grad;
      return Object(THPVariable_Wrap(std::move(read.tensor)));
    });
    in.array_of(0);
    const char* start = in.position();
    value_count_ = in.array();
    bool nested = false;
    for (size_t i = 0; i < value_count_; ++i) check(in, 0, nested);
    values_ = {start, static_cast<size_t>(in.position() - start)};
    start = in.position();
    const size_t placed = in.array();
    for (size_t i = 0; i < placed; ++i) {
      in.array_of(2);
      if (in.natural() >= value_count_ || in.natural() >= tensor_count_) throw NotMine();
    }
    places_ = {start, static_cast<size_t>(in.position() - start)};
    if (!in.binary().empty()) throw NotMine();  // a pickle
    const uint8_t form = in.byte();
    nested_ = form == static_cast<uint8_t>(NESTED);
    if ((form != 0 && !nested_) || (nested && !nested_) || (nested_ && placed) || in.byte() != 0) throw NotMine();
  }

  PyObject* tensors() const { return tensors_.get(); }
  bool requires_grad() const { return requires_grad_; }
  size_t value_count() const { return value_count_; }

  // The values, with these tensors in place of those of the message.
  Object values(PyObject* tensors, PyObject* worker) const {
    if (!PyList_Check(tensors) || size_of(tensors) < tensor_count_) {
      PyErr_Format(PyExc_TypeError, "the message has %zu tensors, so a list of so many is needed", tensor_count_);
      throw PythonError();
    }
    Reader in(values_);
    const size_t count = in.array();
    Object list = make_items(in, count, tensors, worker);
    Reader places(places_);
    for (size_t left = places.array(); left; --left) {
      places.array();
      const auto place = static_cast<Py_ssize_t>(places.natural());
      if (PyList_SetItem(list.get(), place, tensor_at(tensors, places.natural()).release())) throw PythonError();
    }
    return list;
  }

 private:
  static bool is_array(uint8_t head) { return (head & 0xf0) == 0x90 || head == 0xdc || head == 0xdd; }
  static bool is_text(uint8_t head) { return (head & 0xe0) == 0xa0 || (head >= 0xd9 && head <= 0xdb); }
  static bool is_binary(uint8_t head) { return head >= 0xc4 && head <= 0xc6; }

  // Checks that a value is well-formed, and whether it is nested.
  void check(Reader& in, size_t depth, bool& nested) const {
    const uint8_t head = in.peek();
    if (is_array(head)) {
      nested = true;
      if (depth > MAX_READ_DEPTH) throw NotMine();
      const size_t size = in.array();
      if (!size) throw NotMine();
      const uint64_t tag = in.natural();
      if (tag == DICT && size % 2 == 0) throw NotMine();
      if (tag == TENSOR) {
        if (size != 2 || in.natural() >= tensor_count_) throw NotMine();
        return;
      }
      for (size_t i = 1; i < size; ++i) check(in, depth + 1, nested);
      return;
    }
    if (is_text(head)) return void(in.text());
    if (is_binary(head)) return void(in.binary());
    in.byte();
    if (head < 0x80 || head >= 0xe0 || head == 0xc0 || head == 0xc2 || head == 0xc3) return;
    switch (head) {
      case 0xcc: case 0xd0: return void(in.take(1));
      case 0xcd: case 0xd1: return void(in.take(2));
      case 0xce: case 0xd2: return void(in.take(4));
      case 0xcb: case 0xcf: case 0xd3: return void(in.take(8));
      default: throw NotMine();
    }
  }

  static Object make_scalar(Reader& in) {
    const uint8_t head = in.peek();
    if (head < 0x80 || (head >= 0xcc && head <= 0xcf)) return Object(PyLong_FromUnsignedLongLong(in.natural()));
    if (is_text(head)) return from_ascii(in.text());
    if (is_binary(head)) return from_bytes(in.binary());
    if (head == 0xcb) return Object(PyFloat_FromDouble(in.real()));
    in.byte();
    if (head >= 0xe0) return Object(PyLong_FromLong(static_cast<int8_t>(head)));
    switch (head) {
      case 0xc0: return Object::borrowed(Py_None);
      case 0xc2: return Object::borrowed(Py_False);
      case 0xc3: return Object::borrowed(Py_True);
      case 0xd0: return Object(PyLong_FromLong(static_cast<int8_t>(in.number<uint8_t>())));
      case 0xd1: return Object(PyLong_FromLong(static_cast<int16_t>(in.number<uint16_t>())));
      case 0xd2: return Object(PyLong_FromLong(static_cast<int32_t>(in.number<uint32_t>())));
      case 0xd3: return Object(PyLong_FromLongLong(static_cast<int64_t>(in.number<uint64_t>())));
      default: throw NotMine();
    }
  }

  static Object tensor_at(PyObject* tensors, uint64_t index) {
    PyObject* found = PyList_GetItem(tensors, static_cast<Py_ssize_t>(index));  // raises if a callback shortened it
    if (!found) throw PythonError();
    return Object::borrowed(found);
  }

  // Appends the items, because callbacks must not meet a list with empty places.
  static Object make_items(Reader& in, size_t size, PyObject* tensors, PyObject* worker) {
    Object list(PyList_New(0));
    for (size_t i = 0; i < size; ++i) append(list.get(), make(in, tensors, worker).get());
    return list;
  }

  static Object make(Reader& in, PyObject* tensors, PyObject* worker) {
    if (!is_array(in.peek())) return make_scalar(in);
    const size_t size = in.array() - 1;
    const uint64_t tag = in.natural();
    if (tag == TENSOR) return tensor_at(tensors, in.natural());
    if (tag == DICT) {
      Object made(PyDict_New());
      for (size_t i = 0; i < size; i += 2) {
        const Object key = make(in, tensors, worker), item = make(in, tensors, worker);
        set_item(made.get(), key.get(), item.get());
      }
      return made;
    }
    Object items = make_items(in, size, tensors, worker);
    if (tag == LIST) return items;
    if (tag == TUPLE) return Object(PyList_AsTuple(items.get()));
    const Object number(PyLong_FromUnsignedLongLong(tag));
    PyObject* arguments[] = {number.get(), items.get(), worker};
    return Object(PyObject_Vectorcall(callbacks.put_together, arguments, 3, nullptr));
  }

  Object tensors_;
  std::string_view values_, places_;
  size_t tensor_count_ = 0, value_count_ = 0;
  bool requires_grad_ = false, nested_ = false;
};

}  // namespace backhaul
