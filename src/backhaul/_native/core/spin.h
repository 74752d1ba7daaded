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
inline Object spin_without_interpreter(PyObject* descriptors, PyObject* word, PyObject* expected, PyObject* most,
                                       PyObject* seconds) {
  if (!PyTuple_CheckExact(descriptors)) raise(PyExc_TypeError, "spin takes a tuple of descriptors");
  std::vector<pollfd> polled;
  for (size_t i = 0; i < size_of(descriptors); ++i)
    polled.push_back({static_cast<int>(integer_of(item_of(descriptors, i))), POLLIN, 0});
  const int64_t value = integer_of(expected), polls = integer_of(most);
  const double time = PyFloat_AsDouble(seconds);
  if (PyErr_Occurred()) throw PythonError();
  const View view(word);
  if (view.size() != sizeof(int64_t)) raise(PyExc_ValueError, "the word has 8 bytes");
  SpinEnd end;
  Py_BEGIN_ALLOW_THREADS;
  end = spin(polled, *reinterpret_cast<const int64_t*>(view.data()), value, polls, static_cast<int64_t>(time * 1e9));
  Py_END_ALLOW_THREADS;
  return Object(PyLong_FromLong(end));
}

}  // namespace backhaul
