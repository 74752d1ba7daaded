// Owned references to Python objects, and Python errors as C++ exceptions.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <utility>

namespace backhaul {

// Thrown after a function of CPython's has set an error.
struct PythonError {};

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

  static Object borrowed(PyObject* object) {
    Py_INCREF(object);
    return Object(object);
  }

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

 private:
  Py_buffer view_;
};

}  // namespace backhaul
