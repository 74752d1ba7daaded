// Functions of autograd return None for what they do not do, instead of calling a twin.
#pragma once

#include <exception>
#include <new>

#include "msgpack.h"
#include "python.h"

namespace backhaul {

// Calls `work`, which returns a new reference, with C++ exceptions turned into Python's; None: "not mine".
template <class Work>
PyObject* or_none(Work work) {
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

}  // namespace backhaul
