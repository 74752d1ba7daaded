// Frames <-> bytes, as `_wire/frames.py` describes them. Handles small frames that are whole in memory.
#pragma once

#include <memory>
#include <vector>

#include "msgpack.h"
#include "python.h"

namespace backhaul {

constexpr char START[] = "BkHl\x01";  // magic and version
constexpr size_t HEADER_BYTES = 32;
constexpr size_t MAX_JOINED_BYTES = 8 << 10;  // as in `_wire/frames.py`
inline PyObject* frame_type = nullptr;        // `_wire/frames.py`, Frame

// The header; its numbers are little-endian.
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

// Copies of the buffers of a frame, whose lengths are at `table`; null if the table contradicts the header.
inline Object cut_buffers(const char* table, const char* at, const Header& header) {
  std::vector<uint64_t> lengths(header.buffers);
  if (!lengths.empty()) std::memcpy(lengths.data(), table, 8 * lengths.size());
  uint64_t unused = header.payload;
  for (const uint64_t length : lengths) {
    if (length > unused) return {};
    unused -= length;
  }
  if (unused) return {};
  return list_of(lengths.size(), [&](size_t i) {
    const char* start = std::exchange(at, at + lengths[i]);
    return Object(PyByteArray_FromStringAndSize(start, static_cast<Py_ssize_t>(lengths[i])));
  });
}

// Appends to `frames` those that are whole in `memory` from `start` on. Returns where the first of the others begins,
// which is incomplete, has flags, is over a limit or is malformed.
inline size_t cut_frames(PyObject* frames, std::string_view memory, size_t start, size_t limit, size_t most_buffers) {
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
    const char* message = at + HEADER_BYTES + table;
    const Object buffers = cut_buffers(at + HEADER_BYTES, message + header.body, header);
    if (!buffers) break;
    const Object kind(PyLong_FromLong(header.kind)), number(PyLong_FromUnsignedLongLong(header.number));
    const Object body(PyByteArray_FromStringAndSize(message, header.body));
    PyObject* arguments[] = {kind.get(), number.get(), body.get(), buffers.get()};
    const Object frame(PyObject_Vectorcall(frame_type, arguments, 4, nullptr));
    append(frames, frame.get());
    start += size;
  }
  return start;
}

// A frame on its way out: its header and table, written at once; its message; and its buffers.
class FrameWriter {
 public:
  // Throws `NotMine` if the message or the number of buffers is too large for a frame.
  FrameWriter(uint8_t kind, uint64_t number, std::string_view message, const std::vector<std::string_view>& buffers)
      : message_(message), buffers_(buffers) {
    for (const std::string_view& buffer : buffers) payload_ += buffer.size();
    if (message.size() > UINT32_MAX || buffers.size() > UINT32_MAX) throw NotMine();
    header_ = {kind, 0, static_cast<uint32_t>(buffers.size()), static_cast<uint32_t>(message.size()), number, payload_};
  }

  // Whether all of the frame is to be copied into one piece.
  bool small() const { return payload_ <= MAX_JOINED_BYTES; }

  // The wire form of a small frame.
  Object join() const {
    const size_t head = HEADER_BYTES + 8 * buffers_.size() + message_.size();
    Object joined(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(head + payload_)));
    char* at = PyBytes_AS_STRING(joined.get());
    header_.write(at);
    at += HEADER_BYTES;
    for (const std::string_view& buffer : buffers_) {
      const uint64_t size = buffer.size();
      std::memcpy(at, &size, 8);
      at += 8;
    }
    at = std::copy(message_.begin(), message_.end(), at);
    for (const std::string_view& buffer : buffers_) at = std::copy(buffer.begin(), buffer.end(), at);
    return joined;
  }

 private:
  std::string_view message_;
  const std::vector<std::string_view>& buffers_;
  uint64_t payload_ = 0;
  Header header_;
};

// cut_frames(frames, memory, start, end, limit, most_buffers) -> new start
inline Object cut_memory(PyObject* frames, PyObject* memory, PyObject* start, PyObject* end, PyObject* limit,
                         PyObject* most_buffers) {
  const View view(memory);
  const size_t from = size_in(start), to = size_in(end);
  if (!PyList_CheckExact(frames) || to > view.size() || from > to || !frame_type)
    raise(PyExc_ValueError, "cut_frames needs a list, and a part of the memory");
  const std::string_view whole(view.data(), to);
  return Object(PyLong_FromSize_t(cut_frames(frames, whole, from, size_in(limit), size_in(most_buffers))));
}

// join_frame(kind, number, body, buffers) -> the bytes of a frame without slots whose buffers are small; None for others
inline Object join_frame(PyObject* kind, PyObject* number, PyObject* body, PyObject* buffers) {
  const size_t code = size_in(kind);
  if (code > UINT8_MAX || !is_sequence(buffers)) throw NotMine();
  const View message(body);
  std::vector<std::unique_ptr<View>> views;
  std::vector<std::string_view> bytes;
  size_t payload = 0;
  for (size_t i = 0; i < size_of(buffers); ++i) {
    views.push_back(std::make_unique<View>(item_of(buffers, i)));
    bytes.push_back(views.back()->bytes());
    payload += bytes.back().size();
    if (payload > MAX_JOINED_BYTES) throw NotMine();
  }
  return FrameWriter(static_cast<uint8_t>(code), size_in(number), message.bytes(), bytes).join();
}

}  // namespace backhaul
