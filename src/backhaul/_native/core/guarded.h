// What every function that Python calls needs: the number of its arguments, and C++ exceptions as Python's.
#pragma once

#include <exception>
#include <new>

#include "msgpack.h"
#include "python.h"

namespace backhaul {

// Calls `work`, which returns a new reference, with C++ exceptions turned into what Python expects.
template <class Work>
PyObject* guarded(Work work) {
  try {
    return work();
  } catch (const NotMine&) {
    Py_RETURN_NONE;
  } catch (const PythonError&) {
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline bool expect(Py_ssize_t given, Py_ssize_t expected) {
  if (given == expected) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", expected, given);
  return false;
}

template <class Function>
PyCFunction fast(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

}  // namespace backhaul
