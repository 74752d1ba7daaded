// Values <-> payloads. The format and its limits are those of `_wire/codec.py` and `_wire/nested.py`.
#pragma once

#include <unordered_set>

#include "tensors.h"

namespace backhaul {

constexpr size_t MAX_PLAIN_VALUES = 64;    // as in `_wire/codec.py`
constexpr size_t MAX_NESTED_VALUES = 512;  // as in `_wire/nested.py`
constexpr size_t MAX_NESTED_DEPTH = 32;
constexpr int64_t NESTED = -2;  // as in `_wire/messages.py`
enum Tag : uint8_t { TENSOR = 0, LIST = 1, TUPLE = 2, DICT = 3 };

// Functions of `_wire/nested.py`: for values other than scalars, tensors, lists, tuples and dicts.
struct Callbacks {
  PyObject* take_apart = nullptr;    // (value, main_shared, parcels) -> (tag, *items), or None
  PyObject* put_together = nullptr;  // (tag, items, worker) -> value
};
inline Callbacks callbacks;

inline bool is_tensor(PyObject* value) { return reinterpret_cast<PyObject*>(Py_TYPE(value)) == THPVariableClass; }

// Writes one scalar. Returns false if the value is of another type, or is a scalar that needs a form of its own.
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
  if (PyUnicode_CheckExact(value)) {
    if (!PyUnicode_IS_ASCII(value)) throw NotMine();
    return out.text({static_cast<const char*>(PyUnicode_DATA(value)), size_t(PyUnicode_GET_LENGTH(value))}), true;
  }
  if (PyBytes_CheckExact(value))
    return out.binary({PyBytes_AS_STRING(value), size_t(PyBytes_GET_SIZE(value))}), true;
  return false;
}

// Encodes the values of one message.
class ValueWriter {
 public:
  // `apart`: whether each tensor arrives as one of its own, also if it comes twice or shares memory with another.
  ValueWriter(bool main_shared, bool apart, PyObject* parcels)
      : main_shared_(main_shared), apart_(apart), parcels_(parcels) {}

  // The payload. Throws `NotMine` for values that Python has to encode.
  std::string write(PyObject* const* values, size_t count) {
    Writer plain, places;
    bool nested = count > MAX_PLAIN_VALUES;
    size_t placed = 0;
    plain.array(count);
    for (size_t i = 0; i < count && !nested; ++i) {
      if (is_tensor(values[i])) {
        places.array(2);
        places.natural(i);
        places.natural(index_of(values[i]));
        plain.nil();
        ++placed;
      } else if (!write_scalar(plain, values[i])) {
        nested = true;
      }
    }
    if (nested) {
      plain = Writer();
      places = Writer();
      placed = 0;
      tensors_.clear();
      plain.array(count);
      for (size_t i = 0; i < count; ++i) write_nested(plain, values[i], 0);
    }
    Writer out;
    out.array(6);
    write_table(out);
    out.raw(plain.bytes);
    out.array(placed);
    out.raw(places.bytes);
    out.binary({});
    out.integer(nested ? NESTED : 0);
    out.natural(0);
    return std::move(out.bytes);
  }

  // The tensors of the payload, and the memory of each.
  Object tensors() const {
    Object list(PyList_New(static_cast<Py_ssize_t>(tensors_.size())));
    for (size_t i = 0; i < tensors_.size(); ++i) PyList_SET_ITEM(list.get(), i, Py_NewRef(tensors_[i]));
    return list;
  }

  Object buffers() const {
    Object list(PyList_New(static_cast<Py_ssize_t>(tensors_.size())));
    for (size_t i = 0; i < tensors_.size(); ++i)
      PyList_SET_ITEM(list.get(), i, TensorMemory::make(THPVariable_Unpack(tensors_[i]), spans_[i]));
    return list;
  }

 private:
  size_t index_of(PyObject* tensor) {
    PyObject** attributes = _PyObject_GetDictPtr(tensor);
    if (attributes && *attributes && PyDict_GET_SIZE(*attributes)) throw NotMine();
    const auto found = apart_ ? tensors_.end() : std::find(tensors_.begin(), tensors_.end(), tensor);
    const size_t index = static_cast<size_t>(found - tensors_.begin());
    if (found == tensors_.end()) tensors_.push_back(tensor);
    return index;
  }

  void write_table(Writer& out) {
    Writer records;
    for (PyObject* tensor : tensors_) spans_.push_back(write_tensor(records, THPVariable_Unpack(tensor)));
    if (!apart_ && overlap(spans_)) throw NotMine();
    out.array(4);
    out.array(0);
    out.array(0);
    out.array(tensors_.size());
    out.raw(records.bytes);
    out.array(0);
  }

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
      const size_t size = static_cast<size_t>(PySequence_Fast_GET_SIZE(value));
      out.array(size + 1);
      out.natural(list ? LIST : TUPLE);
      for (size_t i = 0; i < size; ++i) {
        if (static_cast<size_t>(PySequence_Fast_GET_SIZE(value)) != size) throw NotMine();  // a callback changed it
        write_nested(out, PySequence_Fast_GET_ITEM(value, i), depth + 1);
      }
    } else if (PyDict_CheckExact(value)) {
      check_first(value);
      const Py_ssize_t size = PyDict_GET_SIZE(value);
      out.array(2 * static_cast<size_t>(size) + 1);
      out.natural(DICT);
      PyObject *key, *item;
      Py_ssize_t at = 0;
      while (PyDict_Next(value, &at, &key, &item)) {
        write_nested(out, key, depth + 1);
        write_nested(out, item, depth + 1);
        if (PyDict_GET_SIZE(value) != size) throw NotMine();
      }
    } else {
      write_taken_apart(out, value, depth);
    }
  }

  void write_taken_apart(Writer& out, PyObject* value, size_t depth) {
    PyObject* arguments[] = {value, main_shared_ ? Py_True : Py_False, parcels_};
    Object parts(PyObject_Vectorcall(callbacks.take_apart, arguments, 3, nullptr));
    if (parts.get() == Py_None) throw NotMine();
    check_first(value);
    const size_t size = static_cast<size_t>(PyTuple_GET_SIZE(parts.get()));
    out.array(size);
    for (size_t i = 0; i < size; ++i) write_nested(out, PyTuple_GET_ITEM(parts.get(), i), i ? depth + 1 : depth);
    kept_.push_back(std::move(parts));
  }

  // The other end would make two objects of an object that comes twice. Pickle keeps it one.
  void check_first(PyObject* value) {
    if (!seen_.insert(value).second) throw NotMine();
  }

  const bool main_shared_, apart_;
  PyObject* const parcels_;
  std::vector<PyObject*> tensors_;  // borrowed: the values, or `kept_`, keep them
  std::vector<Outgoing> spans_;
  std::unordered_set<PyObject*> seen_;
  std::vector<Object> kept_;
  size_t count_ = 0;
};

// The payload of a message that has arrived: its tensors, and where its values begin.
class Payload {
 public:
  Payload(PyObject* body, std::string_view bytes, PyObject* buffers) : body_(Object::borrowed(body)) {
    Reader in(bytes);
    in.array_of(6);
    in.array_of(4);
    in.array_of(0);
    in.array_of(0);
    const size_t count = in.array();
    if (PySequence_Fast_GET_SIZE(buffers) != static_cast<Py_ssize_t>(count)) throw NotMine();
    tensors_ = Object(PyList_New(static_cast<Py_ssize_t>(count)));
    for (size_t i = 0; i < count; ++i) {
      at::Tensor made = read_tensor(in.binary(), PySequence_Fast_GET_ITEM(buffers, i));
      PyObject* wrapped = THPVariable_Wrap(std::move(made));
      if (!wrapped) throw PythonError();
      PyList_SET_ITEM(tensors_.get(), i, wrapped);
    }
    in.array_of(0);
    values_ = {in.position(), in.left()};
    skip_values(in);
    const std::string_view places{in.position(), in.left()};
    const size_t placed = in.array();
    for (size_t i = 0; i < placed; ++i) {
      in.array_of(2);
      if (in.natural() >= value_count_ || in.natural() >= count) throw NotMine();
    }
    if (!in.binary().empty()) throw NotMine();  // a pickle
    const uint8_t form = in.byte();
    if (form != 0 && form != static_cast<uint8_t>(NESTED)) throw NotMine();
    nested_ = form != 0;
    if (in.byte() != 0 || in.left()) throw NotMine();
    places_ = places;
  }

  PyObject* tensors() const { return tensors_.get(); }

  // The values, with these tensors in place of those of the message.
  Object values(PyObject* tensors, PyObject* worker) const {
    Reader in(values_);
    const size_t count = in.array();
    Object list(PyList_New(static_cast<Py_ssize_t>(count)));
    for (size_t i = 0; i < count; ++i) {
      Object value = nested_ ? read_nested(in, tensors, worker) : read_scalar(in);
      PyList_SET_ITEM(list.get(), i, value.release());
    }
    Reader places(places_);
    for (size_t left = places.array(); left; --left) {
      places.array();
      const auto place = static_cast<Py_ssize_t>(places.natural());
      PyObject* tensor = PyList_GetItem(tensors, static_cast<Py_ssize_t>(places.natural()));
      if (!tensor || PyList_SetItem(list.get(), place, Py_NewRef(tensor))) throw PythonError();
    }
    return list;
  }

 private:
  static constexpr size_t MAX_SKIPPED_DEPTH = 2 * MAX_NESTED_DEPTH;

  static Object read_scalar(Reader& in) {
    const uint8_t head = in.peek();
    if (head < 0x80 || (head >= 0xcc && head <= 0xcf)) return Object(PyLong_FromUnsignedLongLong(in.natural()));
    if ((head & 0xe0) == 0xa0 || (head >= 0xd9 && head <= 0xdb)) {
      const std::string_view text = in.text();
      PyObject* made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
      return Object(made);
    }
    if (head >= 0xc4 && head <= 0xc6) {
      const std::string_view bytes = in.binary();
      return Object(PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
    }
    in.byte();
    if (head >= 0xe0) return Object(PyLong_FromLong(static_cast<int8_t>(head)));
    switch (head) {
      case 0xc0: return Object::borrowed(Py_None);
      case 0xc2: return Object::borrowed(Py_False);
      case 0xc3: return Object::borrowed(Py_True);
      case 0xcb: {
        const uint64_t bits = in.number<uint64_t>();
        double value;
        std::memcpy(&value, &bits, sizeof value);
        return Object(PyFloat_FromDouble(value));
      }
      case 0xd0: return Object(PyLong_FromLong(static_cast<int8_t>(in.number<uint8_t>())));
      case 0xd1: return Object(PyLong_FromLong(static_cast<int16_t>(in.number<uint16_t>())));
      case 0xd2: return Object(PyLong_FromLong(static_cast<int32_t>(in.number<uint32_t>())));
      case 0xd3: return Object(PyLong_FromLongLong(static_cast<int64_t>(in.number<uint64_t>())));
      default: throw NotMine();
    }
  }

  static bool is_array(uint8_t head) { return (head & 0xf0) == 0x90 || head == 0xdc || head == 0xdd; }

  // Checks that the values are well-formed, before any of them is made.
  void skip_values(Reader& in) {
    value_count_ = in.array();
    for (size_t i = 0; i < value_count_; ++i) skip(in, 0);
  }

  static void skip(Reader& in, size_t depth) {
    if (depth > MAX_SKIPPED_DEPTH) throw NotMine();
    if (is_array(in.peek())) {
      for (size_t left = in.array(); left; --left) skip(in, depth + 1);
      return;
    }
    const uint8_t head = in.peek();
    if ((head & 0xe0) == 0xa0 || (head >= 0xd9 && head <= 0xdb)) return void(in.text());
    if (head >= 0xc4 && head <= 0xc6) return void(in.binary());
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

  static Object read_nested(Reader& in, PyObject* tensors, PyObject* worker) {
    if (!is_array(in.peek())) return read_scalar(in);
    const size_t size = in.array();
    if (!size) throw NotMine();
    const uint64_t tag = in.natural();
    const auto items = static_cast<Py_ssize_t>(size - 1);
    if (tag == TENSOR) {
      if (items != 1) throw NotMine();
      const uint64_t index = in.natural();
      if (index >= static_cast<uint64_t>(PyList_GET_SIZE(tensors))) throw NotMine();
      return Object::borrowed(PyList_GET_ITEM(tensors, static_cast<Py_ssize_t>(index)));
    }
    if (tag == DICT) {
      if (items % 2) throw NotMine();
      Object made(PyDict_New());
      for (Py_ssize_t i = 0; i < items; i += 2) {
        const Object key = read_nested(in, tensors, worker), item = read_nested(in, tensors, worker);
        if (PyDict_SetItem(made.get(), key.get(), item.get())) throw PythonError();
      }
      return made;
    }
    Object made(tag == TUPLE ? PyTuple_New(items) : PyList_New(items));
    for (Py_ssize_t i = 0; i < items; ++i) {
      PyObject* item = read_nested(in, tensors, worker).release();
      if (tag == TUPLE) PyTuple_SET_ITEM(made.get(), i, item);
      else PyList_SET_ITEM(made.get(), i, item);
    }
    if (tag == TUPLE || tag == LIST) return made;
    const Object number(PyLong_FromUnsignedLongLong(tag));
    PyObject* arguments[] = {number.get(), made.get(), worker};
    return Object(PyObject_Vectorcall(callbacks.put_together, arguments, 3, nullptr));
  }

  Object body_;  // keeps the bytes
  Object tensors_;
  std::string_view values_, places_;
  size_t value_count_ = 0;
  bool nested_ = false;
};

}  // namespace backhaul
