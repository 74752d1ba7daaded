// The functions of autograd that Python calls; as in `module.cpp`.
#pragma once

#include "engine_run.h"
#include "guarded.h"

namespace backhaul {

// set_names(mark, plain_recv, gradient_edge)
inline PyObject* set_names(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 3)) return nullptr;
  names = {Py_NewRef(arguments[0]), Py_NewRef(arguments[1]), Py_NewRef(arguments[2])};
  Py_RETURN_NONE;
}

// record_sent(index, tensors, copies) -> (places of those that require grad, source, on the host); () if none does
inline PyObject* record_sent(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 3)) return nullptr;
  return or_none([&]() -> PyObject* {
    const bool listed = PyList_Check(arguments[1]) || PyTuple_Check(arguments[1]);
    if (Py_TYPE(arguments[0]) != &SourceIndex::type || !listed || !PyAnySet_Check(arguments[2])) {
      PyErr_SetString(PyExc_TypeError, "record_sent needs an index, a list and a set");
      return nullptr;
    }
    HANDLE_TH_ERRORS
    Sent sent(arguments[1], arguments[2]);
    if (sent.edges.empty()) return PyTuple_New(0);
    Object numbers(PyTuple_New(static_cast<Py_ssize_t>(sent.places.size())));
    for (size_t i = 0; i < sent.places.size(); ++i)
      PyTuple_SET_ITEM(numbers.get(), static_cast<Py_ssize_t>(i), Object(PyLong_FromSsize_t(sent.places[i])).release());
    const Object source(Source::make(SourceIndex::of(arguments[0]), std::move(sent.edges)));
    return PyTuple_Pack(3, numbers.get(), source.get(), sent.on_host ? Py_True : Py_False);
    END_HANDLE_TH_ERRORS
  });
}

// received_behind(roots) -> [recv, ...]
inline PyObject* find_received(PyObject*, PyObject* roots) {
  return or_none([&]() -> PyObject* {
    if (!PyTuple_Check(roots) && !PyList_Check(roots)) throw NotMine();
    return received_behind(roots).release();
  });
}

// run_sources(index, sources, counts, gradients, retain, most_nodes, forget) -> (gradients of leaves, answers)
inline PyObject* run_sources(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (!expect(count, 7)) return nullptr;
  return or_none([&]() -> PyObject* {
    if (Py_TYPE(arguments[0]) != &SourceIndex::type) throw NotMine();
    for (int i = 1; i <= 3; ++i)
      if (!PyList_CheckExact(arguments[i])) throw NotMine();
    if (PyList_GET_SIZE(arguments[1]) != PyList_GET_SIZE(arguments[2])) throw NotMine();
    const size_t most = PyLong_AsSize_t(arguments[5]);
    if (PyErr_Occurred()) throw PythonError();
    EngineRun run(SourceIndex::of(arguments[0]), arguments[1], arguments[2], arguments[3], most,
                  arguments[6] == Py_True);
    HANDLE_TH_ERRORS
    return run(arguments[4] == Py_True).release();
    END_HANDLE_TH_ERRORS
  });
}

inline PyMethodDef autograd_functions[] = {
    {"set_names", fast(set_names), METH_FASTCALL, nullptr},
    {"record_sent", fast(record_sent), METH_FASTCALL, nullptr},
    {"received_behind", find_received, METH_O, nullptr},
    {"run_sources", fast(run_sources), METH_FASTCALL, nullptr},
    {},
};

// Adds what autograd needs to the module.
inline bool add_autograd(PyObject* module) {
  if (PyType_Ready(&SourceIndex::type) || PyType_Ready(&Source::type) || PyType_Ready(&LeafGradients::type)) return false;
  return !PyModule_AddFunctions(module, autograd_functions) &&
         !PyModule_AddObjectRef(module, "SourceIndex", reinterpret_cast<PyObject*>(&SourceIndex::type));
}

}  // namespace backhaul
