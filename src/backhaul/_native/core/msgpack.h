// MessagePack, as far as messages of calls need it. Writes the same bytes as msgspec, which is what Python uses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "python.h"

namespace backhaul {

class Writer {
 public:
  std::string bytes;

  void raw(std::string_view data) { bytes.append(data); }

  void nil() { byte(0xc0); }
  void boolean(bool value) { byte(value ? 0xc3 : 0xc2); }

  void integer(int64_t value) {
    if (value >= 0) return natural(static_cast<uint64_t>(value));
    if (value >= -32) return byte(static_cast<uint8_t>(value));
    if (value >= INT8_MIN) return number<uint8_t>(0xd0, static_cast<uint8_t>(value));
    if (value >= INT16_MIN) return number<uint16_t>(0xd1, static_cast<uint16_t>(value));
    if (value >= INT32_MIN) return number<uint32_t>(0xd2, static_cast<uint32_t>(value));
    number<uint64_t>(0xd3, static_cast<uint64_t>(value));
  }

  void natural(uint64_t value) {
    if (value < 0x80) return byte(static_cast<uint8_t>(value));
    if (value <= UINT8_MAX) return number<uint8_t>(0xcc, static_cast<uint8_t>(value));
    if (value <= UINT16_MAX) return number<uint16_t>(0xcd, static_cast<uint16_t>(value));
    if (value <= UINT32_MAX) return number<uint32_t>(0xce, static_cast<uint32_t>(value));
    number<uint64_t>(0xcf, value);
  }

  void real(double value) {
    number<uint64_t>(0xcb, std::bit_cast<uint64_t>(value));
  }

  void text(std::string_view value) {
    const size_t size = value.size();
    if (size < 32) byte(static_cast<uint8_t>(0xa0 | size));
    else if (size <= UINT8_MAX) number<uint8_t>(0xd9, static_cast<uint8_t>(size));
    else if (size <= UINT16_MAX) number<uint16_t>(0xda, static_cast<uint16_t>(size));
    else number<uint32_t>(0xdb, checked(size));
    raw(value);
  }

  void binary(std::string_view value) {
    const size_t size = value.size();
    if (size <= UINT8_MAX) number<uint8_t>(0xc4, static_cast<uint8_t>(size));
    else if (size <= UINT16_MAX) number<uint16_t>(0xc5, static_cast<uint16_t>(size));
    else number<uint32_t>(0xc6, checked(size));
    raw(value);
  }

  // Begins an array; its `size` items follow.
  void array(size_t size) {
    if (size < 16) byte(static_cast<uint8_t>(0x90 | size));
    else if (size <= UINT16_MAX) number<uint16_t>(0xdc, static_cast<uint16_t>(size));
    else number<uint32_t>(0xdd, checked(size));
  }

  // Begins a map; its `size` pairs of key and value follow.
  void map(size_t size) {
    if (size < 16) byte(static_cast<uint8_t>(0x80 | size));
    else if (size <= UINT16_MAX) number<uint16_t>(0xde, static_cast<uint16_t>(size));
    else number<uint32_t>(0xdf, checked(size));
  }

 private:
  void byte(uint8_t value) { bytes.push_back(static_cast<char>(value)); }

  static uint32_t checked(size_t size) {
    if (size > UINT32_MAX) throw NotMine();
    return static_cast<uint32_t>(size);
  }

  template <class T>
  void number(uint8_t head, T value) {
    byte(head);
    for (int shift = 8 * (sizeof(T) - 1); shift >= 0; shift -= 8) byte(static_cast<uint8_t>(value >> shift));
  }
};

// Reads bytes that may be malformed. Throws `NotMine` for bytes that are not what the caller asks for.
class Reader {
 public:
  explicit Reader(std::string_view data) : at_(data.data()), end_(data.data() + data.size()) {}

  const char* position() const { return at_; }
  size_t left() const { return static_cast<size_t>(end_ - at_); }

  uint8_t peek() const {
    if (at_ == end_) throw NotMine();
    return static_cast<uint8_t>(*at_);
  }

  uint8_t byte() {
    const uint8_t value = peek();
    ++at_;
    return value;
  }

  std::string_view take(size_t size) {
    if (left() < size) throw NotMine();
    std::string_view found(at_, size);
    at_ += size;
    return found;
  }

  template <class T>
  T number() {
    T value = 0;
    for (char each : take(sizeof(T))) value = static_cast<T>((static_cast<uint64_t>(value) << 8) | static_cast<uint8_t>(each));
    return value;
  }

  // The number of items of the array that begins here. Each item takes a byte at least, so a hostile number ends here.
  size_t array() {
    const uint8_t head = byte();
    size_t size;
    if ((head & 0xf0) == 0x90) size = head & 0x0f;
    else if (head == 0xdc) size = number<uint16_t>();
    else if (head == 0xdd) size = number<uint32_t>();
    else throw NotMine();
    if (size > left()) throw NotMine();
    return size;
  }

  void array_of(size_t size) {
    if (array() != size) throw NotMine();
  }

  // The number of pairs of the map that begins here.
  size_t map() {
    const uint8_t head = byte();
    size_t size;
    if ((head & 0xf0) == 0x80) size = head & 0x0f;
    else if (head == 0xde) size = number<uint16_t>();
    else if (head == 0xdf) size = number<uint32_t>();
    else throw NotMine();
    if (size > left() / 2) throw NotMine();
    return size;
  }

  uint64_t natural() {
    const uint8_t head = byte();
    if (head < 0x80) return head;
    switch (head) {
      case 0xcc: return number<uint8_t>();
      case 0xcd: return number<uint16_t>();
      case 0xce: return number<uint32_t>();
      case 0xcf: return number<uint64_t>();
      default: throw NotMine();
    }
  }

  bool boolean() {
    const uint8_t head = byte();
    if (head != 0xc2 && head != 0xc3) throw NotMine();
    return head == 0xc3;
  }

  double real() {
    if (byte() != 0xcb) throw NotMine();
    return std::bit_cast<double>(number<uint64_t>());
  }

  // A text of ASCII characters only.
  std::string_view text() {
    const uint8_t head = byte();
    std::string_view found;
    if ((head & 0xe0) == 0xa0) found = take(head & 0x1f);
    else if (head == 0xd9) found = take(number<uint8_t>());
    else if (head == 0xda) found = take(number<uint16_t>());
    else if (head == 0xdb) found = take(number<uint32_t>());
    else throw NotMine();
    if (std::any_of(found.begin(), found.end(), [](char each) { return each & 0x80; })) throw NotMine();
    return found;
  }

  std::string_view binary() {
    switch (byte()) {
      case 0xc4: return take(number<uint8_t>());
      case 0xc5: return take(number<uint16_t>());
      case 0xc6: return take(number<uint32_t>());
      default: throw NotMine();
    }
  }

 private:
  const char* at_;
  const char* end_;
};

}  // namespace backhaul
