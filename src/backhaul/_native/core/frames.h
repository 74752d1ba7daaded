// Frames <-> bytes, as `_wire/frames.py` describes them. Handles small frames that are whole in memory.
#pragma once

#include <vector>

#include "msgpack.h"
#include "python.h"

namespace backhaul {

constexpr char START[] = "BkHl\x01";  // magic and version
constexpr size_t HEADER_BYTES = 32;

// The header, all numbers little-endian as on every machine that torch runs on.
struct Header {
  uint8_t kind;
  uint16_t flags;
  uint32_t buffers, body;
  uint64_t number, payload;

  static Header read(const char* at) {
    Header made;
    std::memcpy(&made.kind, at + 5, 1);
    std::memcpy(&made.flags, at + 6, 2);
    std::memcpy(&made.buffers, at + 8, 4);
    std::memcpy(&made.body, at + 12, 4);
    std::memcpy(&made.number, at + 16, 8);
    std::memcpy(&made.payload, at + 24, 8);
    return made;
  }

  void write(char* at) const {
    std::memcpy(at, START, 5);
    std::memcpy(at + 5, &kind, 1);
    std::memcpy(at + 6, &flags, 2);
    std::memcpy(at + 8, &buffers, 4);
    std::memcpy(at + 12, &body, 4);
    std::memcpy(at + 16, &number, 8);
    std::memcpy(at + 24, &payload, 8);
  }
};

// Appends to `frames` those that are whole in `memory` from `start` on. Returns where the first of the others begins,
// which is incomplete, has flags, is over a limit or is malformed.
inline size_t cut_frames(PyObject* frames, PyObject* make, std::string_view memory, size_t start, size_t limit,
                         size_t most_buffers) {
  while (memory.size() - start >= HEADER_BYTES) {
    const char* at = memory.data() + start;
    if (std::memcmp(at, START, 5)) break;
    const Header header = Header::read(at);
    const size_t table = 8 * size_t{header.buffers}, left = memory.size() - start - HEADER_BYTES;
    if (header.flags || header.buffers > most_buffers || table > left || header.body > left - table ||
        header.payload > left - table - header.body)
      break;
    const size_t size = HEADER_BYTES + table + header.body + header.payload;
    if (size > limit) break;
    const char* lengths = at + HEADER_BYTES;
    const char* piece = lengths + table + header.body;
    uint64_t unused = header.payload;
    Object buffers(PyList_New(header.buffers));
    bool fits = true;
    for (size_t i = 0; i < header.buffers && fits; ++i) {
      uint64_t length;
      std::memcpy(&length, lengths + 8 * i, 8);
      fits = length <= unused;
      if (!fits) break;
      PyObject* made = PyByteArray_FromStringAndSize(piece, static_cast<Py_ssize_t>(length));
      if (!made) throw PythonError();
      PyList_SET_ITEM(buffers.get(), static_cast<Py_ssize_t>(i), made);
      piece += length;
      unused -= length;
    }
    if (!fits || unused) break;
    const Object kind(PyLong_FromLong(header.kind)), number(PyLong_FromUnsignedLongLong(header.number));
    const Object body(PyByteArray_FromStringAndSize(lengths + table, header.body));
    PyObject* arguments[] = {kind.get(), number.get(), body.get(), buffers.get()};
    const Object frame(PyObject_Vectorcall(make, arguments, 4, nullptr));
    if (PyList_Append(frames, frame.get())) throw PythonError();
    start += size;
  }
  return start;
}

// The bytes of a frame without slots whose buffers have `most` bytes at most; null if they have more.
inline PyObject* join_frame(uint8_t kind, uint64_t number, PyObject* body, PyObject* buffers, size_t most) {
  const View message(body);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(buffers);
  std::vector<Py_ssize_t> lengths(static_cast<size_t>(count));
  size_t payload = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Py_ssize_t length = PyObject_Length(PySequence_Fast_GET_ITEM(buffers, i));
    if (length < 0) throw PythonError();
    lengths[static_cast<size_t>(i)] = length;
    payload += static_cast<size_t>(length);
    if (payload > most) return nullptr;
  }
  if (message.size() > UINT32_MAX || static_cast<size_t>(count) > UINT32_MAX) return nullptr;
  const size_t table = 8 * static_cast<size_t>(count);
  Object joined(PyBytes_FromStringAndSize(
      nullptr, static_cast<Py_ssize_t>(HEADER_BYTES + table + message.size() + payload)));
  char* at = PyBytes_AS_STRING(joined.get());
  Header{kind, 0, static_cast<uint32_t>(count), static_cast<uint32_t>(message.size()), number, payload}.write(at);
  at += HEADER_BYTES;
  for (const Py_ssize_t length : lengths) {
    const auto size = static_cast<uint64_t>(length);
    std::memcpy(at, &size, 8);
    at += 8;
  }
  std::memcpy(at, message.data(), message.size());
  at += message.size();
  for (Py_ssize_t i = 0; i < count; ++i) {
    const View buffer(PySequence_Fast_GET_ITEM(buffers, i));
    if (buffer.size() != static_cast<size_t>(lengths[static_cast<size_t>(i)])) return nullptr;
    std::memcpy(at, buffer.data(), buffer.size());
    at += buffer.size();
  }
  return joined.release();
}

}  // namespace backhaul
