// Owned references to Python objects, Python errors as C++ exceptions, and C++ values as Python objects.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

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

// An object of Python's that holds a C++ value. `Held::type` is its type.
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

  static Held& of(PyObject* self) { return reinterpret_cast<Box*>(self)->held; }
};

// Calls `work`, which returns an `Object`, with C++ exceptions turned into Python's.
template <class Work>
PyObject* guarded(Work work) {
  try {
    return work().release();
  } catch (const PythonError&) {
  } catch (const NotMine&) {
    PyErr_SetString(PyExc_ValueError, "the native core of backhaul cannot do this");
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// As `guarded`, but calls `twin`, a function in Python, with the same arguments if `work` cannot do it, or fails. The
// twin then raises the error that says why.
template <class Work>
PyObject* guarded(PyObject* twin, PyObject* const* arguments, Py_ssize_t count, Work work) {
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
  return PyObject_Vectorcall(twin, arguments, static_cast<size_t>(count), nullptr);
}

inline bool expect(Py_ssize_t given, Py_ssize_t expected) {
  if (given == expected) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", expected, given);
  return false;
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

inline PyCFunction fast(FastFunction function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
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

// Fills place `index` of a list that was made by `PyList_New`.
inline void put(PyObject* list, size_t index, Object item) {
  PyList_SET_ITEM(list, static_cast<Py_ssize_t>(index), item.release());
}

}  // namespace backhaul
