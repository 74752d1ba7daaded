// Waiting for descriptors without sleeping and without the interpreter, see `_transport/spin_wait.py`.
#pragma once

#include <poll.h>
#include <sched.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <vector>

#include "python.h"

namespace backhaul {

enum SpinEnd { READY = 0, OVER = 1, CROWDED = 2 };

constexpr int CHECKED_SPINS = 32;       // polls from one look at the clock and the processors to the next
constexpr long SWITCHES_OF_CROWDS = 2;  // so many switches to other threads mean that processors are scarce

inline long switches_to_others() {
  rusage usage;
  return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_nivcsw;
}

// Polls until a descriptor is ready, `word` differs from `expected`, processors turn out to be scarce, or `most` polls
// or `nanoseconds` are over.
inline SpinEnd spin(std::vector<pollfd>& descriptors, const int64_t& word, int64_t expected, int64_t most,
                    int64_t nanoseconds) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::nanoseconds(nanoseconds);
  const long lost = switches_to_others();
  for (int64_t polls = 1;; ++polls) {
    if (__atomic_load_n(&word, __ATOMIC_ACQUIRE) != expected) return READY;
    if (poll(descriptors.data(), descriptors.size(), 0) > 0) return READY;
    if (polls >= most) return OVER;
    sched_yield();
    if (polls % CHECKED_SPINS) continue;
    if (Clock::now() >= until) return OVER;
    if (switches_to_others() >= lost + SWITCHES_OF_CROWDS) return CROWDED;
  }
}

// spin(descriptors, word, expected, most, seconds) -> SpinEnd; `word`: a buffer of one 64-bit integer
inline PyObject* spin_without_interpreter(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 5 || !PyTuple_CheckExact(given[0]))
    return PyErr_SetString(PyExc_TypeError, "spin takes a tuple of descriptors and four more arguments"), nullptr;
  try {
    std::vector<pollfd> descriptors;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[0]); ++i) {
      const long descriptor = PyLong_AsLong(PyTuple_GET_ITEM(given[0], i));
      descriptors.push_back({static_cast<int>(descriptor), POLLIN, 0});
    }
    const long long expected = PyLong_AsLongLong(given[2]), most = PyLong_AsLongLong(given[3]);
    const double seconds = PyFloat_AsDouble(given[4]);
    if (PyErr_Occurred()) return nullptr;
    const View word(given[1]);
    if (word.size() != sizeof(int64_t)) return PyErr_SetString(PyExc_ValueError, "the word has 8 bytes"), nullptr;
    SpinEnd end;
    Py_BEGIN_ALLOW_THREADS;
    end = spin(descriptors, *reinterpret_cast<const int64_t*>(word.data()), expected, most,
               static_cast<int64_t>(seconds * 1e9));
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(end);
  } catch (const PythonError&) {
    return nullptr;
  }
}

}  // namespace backhaul
