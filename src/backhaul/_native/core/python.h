// Owned references to Python objects, Python errors as C++ exceptions, and C++ values as Python objects.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <torch/csrc/Exceptions.h>

#include <bit>
#include <exception>
#include <new>
#include <string_view>
#include <utility>

namespace backhaul {

static_assert(std::endian::native == std::endian::little, "frames and tensors are little-endian");

// Thrown after a function of CPython's has set an error.
struct PythonError {};

// Thrown for what this core does not handle. Its twin in Python then does all of the work, and raises the error if the
// input is malformed.
struct NotMine {};

// A reference that is given back when it goes out of scope.
class Object {
 public:
  Object() = default;
  // Takes over a new reference. Throws if a function of CPython's has returned null.
  explicit Object(PyObject* made) : object_(made) {
    if (!made) throw PythonError();
  }
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  ~Object() { Py_XDECREF(object_); }

  static Object borrowed(PyObject* object) { return Object(Py_NewRef(object)); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// The memory of an object, for as long as this exists.
class View {
 public:
  explicit View(PyObject* object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object, &view_, flags)) throw PythonError();
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() { PyBuffer_Release(&view_); }

  char* data() const { return static_cast<char*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }
  std::string_view bytes() const { return {data(), size()}; }

 private:
  Py_buffer view_;
};

// An object of Python's that holds a C++ value. `Held::type` is its type, which `boxed_type` makes.
template <class Held>
struct Box {
  PyObject_HEAD
  Held held;

  template <class... Arguments>
  static Object make(Arguments&&... arguments) {
    auto* made = PyObject_New(Box, &Held::type);
    if (!made) throw PythonError();
    try {
      new (&made->held) Held(std::forward<Arguments>(arguments)...);
    } catch (...) {
      PyObject_Free(made);
      throw;
    }
    return Object(reinterpret_cast<PyObject*>(made));
  }

  static void dealloc(PyObject* self) {
    of(self).~Held();
    PyObject_Free(self);
  }

  static bool holds(PyObject* object) { return Py_TYPE(object) == &Held::type; }
  static Held& of(PyObject* self) { return reinterpret_cast<Box*>(self)->held; }
};

// What an object of Python's holds. Throws `NotMine` if it is of another type.
template <class Held>
Held& unbox(PyObject* object) {
  if (!Box<Held>::holds(object)) throw NotMine();
  return Box<Held>::of(object);
}

template <class Held>
PyTypeObject boxed_type(const char* name, const char* doc, PyMethodDef* methods = nullptr,
                        PyGetSetDef* attributes = nullptr) {
  return {
      .ob_base = PyVarObject_HEAD_INIT(nullptr, 0)  //
      .tp_name = name,
      .tp_basicsize = sizeof(Box<Held>),
      .tp_dealloc = Box<Held>::dealloc,
      .tp_flags = Py_TPFLAGS_DEFAULT,
      .tp_doc = doc,
      .tp_methods = methods,
      .tp_getset = attributes,
  };
}

// Calls `work`, which returns an `Object`, with C++ exceptions turned into Python's. Returns None for what is not mine.
template <class Work>
PyObject* guarded(Work work) {
  HANDLE_TH_ERRORS
  try {
    return work().release();
  } catch (const NotMine&) {
    Py_RETURN_NONE;
  } catch (const PythonError&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  END_HANDLE_TH_ERRORS
}

// As `guarded`, but calls `twin`, a function in Python, with the same arguments if `work` cannot do it, or fails. The
// twin then raises the error that says why.
template <class Work>
PyObject* guarded(PyObject* twin, PyObject* const* arguments, size_t count, Work work) {
  try {
    if (twin) return work().release();
  } catch (const NotMine&) {
  } catch (const PythonError&) {
  } catch (const std::exception&) {
  }
  if (PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;  // such as KeyboardInterrupt
    PyErr_Clear();
  }
  if (!twin) return PyErr_SetString(PyExc_RuntimeError, "backhaul._wire.call_frames was not imported"), nullptr;
  return PyObject_Vectorcall(twin, arguments, count, nullptr);
}

// Calls a function that takes objects and returns an `Object`, or such a member of what `self` holds.
template <class... Each>
struct Call {
  static constexpr Py_ssize_t count = sizeof...(Each);

  static Object run(Object (*function)(Each...), PyObject*, PyObject* const* given) {
    return spread([&](auto... each) { return function(each...); }, given, std::index_sequence_for<Each...>());
  }

  template <class Held>
  static Object run(Object (Held::*function)(Each...), PyObject* self, PyObject* const* given) {
    Held& held = Box<Held>::of(self);
    return spread([&](auto... each) { return (held.*function)(each...); }, given, std::index_sequence_for<Each...>());
  }

 private:
  template <class Function, size_t... places>
  static Object spread(Function function, PyObject* const* given, std::index_sequence<places...>) {
    return function(given[places]...);
  }
};

template <class... Each>
Call<Each...> call_of(Object (*)(Each...));
template <class Held, class... Each>
Call<Each...> call_of(Object (Held::*)(Each...));

// Such a function as CPython calls it. `twin`: does in Python what it does not; without one it returns None then.
template <auto function, PyObject** twin>
PyObject* called(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  using Call = decltype(call_of(function));
  if (count != Call::count)
    return PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", Call::count, count);
  const auto work = [&] { return Call::run(function, self, given); };
  if constexpr (twin != nullptr) return guarded(*twin, given, Call::count, work);
  else return guarded(work);
}

template <auto function, PyObject** twin = nullptr>
PyMethodDef method(const char* name, const char* doc = nullptr) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(called<function, twin>)), METH_FASTCALL, doc};
}

// A member that takes nothing, as an attribute of the object that holds it.
template <auto member>
PyGetSetDef attribute(const char* name) {
  const auto get = [](PyObject* self, void*) {
    return guarded([&] { return decltype(call_of(member))::run(member, self, nullptr); });
  };
  return {name, get, nullptr, nullptr, nullptr};
}

inline std::string_view ascii(PyObject* text) {
  if (!PyUnicode_CheckExact(text) || !PyUnicode_IS_COMPACT_ASCII(text)) throw NotMine();
  return {static_cast<const char*>(PyUnicode_DATA(text)), static_cast<size_t>(PyUnicode_GET_LENGTH(text))};
}

inline Object from_ascii(std::string_view text) {
  return Object(PyUnicode_DecodeASCII(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

inline Object from_bytes(std::string_view bytes) {
  return Object(PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
}

// The items of a list or a tuple; the caller has checked that it is one.
inline size_t size_of(PyObject* sequence) { return static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence)); }
inline PyObject* item_of(PyObject* sequence, size_t index) {
  return PySequence_Fast_GET_ITEM(sequence, static_cast<Py_ssize_t>(index));
}
inline bool is_sequence(PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); }

// A list of so many items, each of which `make(index)` makes. It must not run code of the user's.
template <class Make>
Object list_of(size_t count, Make make) {
  Object list(PyList_New(static_cast<Py_ssize_t>(count)));
  for (size_t i = 0; i < count; ++i) PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), make(i).release());
  return list;
}

inline Object boolean(bool value) { return Object::borrowed(value ? Py_True : Py_False); }
inline Object none() { return Object::borrowed(Py_None); }

inline void append(PyObject* list, PyObject* item) {
  if (PyList_Append(list, item)) throw PythonError();
}

inline void set_item(PyObject* dict, PyObject* key, PyObject* item) {
  if (PyDict_SetItem(dict, key, item)) throw PythonError();
}

// An item of a dict, borrowed; null if it is not there.
inline PyObject* find_item(PyObject* dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (!found && PyErr_Occurred()) throw PythonError();
  return found;
}

inline int64_t integer_of(PyObject* object) {
  const long long number = PyLong_AsLongLong(object);
  if (number == -1 && PyErr_Occurred()) throw PythonError();
  return number;
}

inline size_t size_in(PyObject* object) {
  const size_t size = PyLong_AsSize_t(object);
  if (PyErr_Occurred()) throw PythonError();
  return size;
}

// Refuses arguments that no caller gives.
[[noreturn]] inline void raise(PyObject* type, const char* text) {
  PyErr_SetString(type, text);
  throw PythonError();
}

inline PyObject* interned(const char* text) {
  PyObject* made = PyUnicode_InternFromString(text);
  if (!made) throw PythonError();
  return made;
}

}  // namespace backhaul
