// The functions that Python calls. `connect` comes first: it names what they need of Python's.
#include "autograd.h"
#include "calls.h"
#include "frames.h"
#include "graph.h"
#include "spin.h"
#include "values.h"

namespace backhaul {
namespace {

// The functions in Python that do what this core does not, see `_wire/call_frames.py`.
struct Twins {
  PyObject *encode_values, *request_frame, *reply_frame, *read_request, *read_reply, *read_values;
} twins;

const std::pair<const char*, PyObject**> connected[] = {
    {"frame", &frame_type},
    {"raw", &Outgoing::raw},
    {"take_apart", &callbacks.take_apart},
    {"put_together", &callbacks.put_together},
    {"immutable", &callbacks.immutable},
    {"mark", &names.mark},
    {"plain_recv", &names.plain_recv},
    {"gradient_edge", &names.gradient_edge},
    {"encode_values", &twins.encode_values},
    {"request_frame", &twins.request_frame},
    {"reply_frame", &twins.reply_frame},
    {"read_request", &twins.read_request},
    {"read_reply", &twins.read_reply},
    {"read_values", &twins.read_values},
};

// connect(**objects): keeps objects of Python's for good, by the names above. Each module gives its own.
PyObject* connect(PyObject*, PyObject*, PyObject* objects) {
  return guarded([&] {
    Py_ssize_t left = objects ? PyDict_GET_SIZE(objects) : 0;
    for (const auto& [name, place] : connected) {
      PyObject* given = left ? PyDict_GetItemString(objects, name) : nullptr;
      if (!given) continue;
      *place = Py_NewRef(given);
      --left;
    }
    if (left) raise(PyExc_TypeError, "connect got an object under another name than those in module.cpp");
    return none();
  });
}

PyMethodDef functions[] = {
    {"connect", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(connect)), METH_VARARGS | METH_KEYWORDS, nullptr},
    method<encode_values, &twins.encode_values>("encode_values"),
    method<request_frame, &twins.request_frame>("request_frame"),
    method<reply_frame, &twins.reply_frame>("reply_frame"),
    method<read_message<REQUEST>, &twins.read_request>("read_request"),
    method<read_message<REPLY>, &twins.read_reply>("read_reply"),
    method<read_values, &twins.read_values>("read_values"),
    method<cut_memory>("cut_frames"),
    method<join_frame>("join_frame"),
    method<record_received>("record_received"),
    method<record_sent>("record_sent"),
    method<record_message>("record_message"),
    method<received_behind>("received_behind"),
    method<run_sources>("run_sources"),
    method<claim>("claim"),
    method<read_gradients>("read_gradients"),
    method<spin_without_interpreter>("spin"),
    {},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "backhaul_core", "The straight line of a message, see `backhaul._native`.", -1, functions,
};

}  // namespace
}  // namespace backhaul

PyMODINIT_FUNC PyInit_backhaul_core() {
  using namespace backhaul;
  for (PyTypeObject* type : {&TensorMemory::type, &Outgoing::type, &Received::type, &SourceIndex::type, &Source::type,
                             &LeafGradients::type})
    if (PyType_Ready(type)) return nullptr;
  return guarded([] {
    Object module(PyModule_Create(&definition));
    auto* index = reinterpret_cast<PyObject*>(&SourceIndex::type);
    if (PyModule_AddObjectRef(module.get(), "SourceIndex", index)) throw PythonError();
    return module;
  });
}
