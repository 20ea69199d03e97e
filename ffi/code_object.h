// What an AMD code object says of its kernels' parameters, in its note NT_AMDGPU_METADATA: a
// MessagePack document (LLVM's "User Guide for AMDGPU Backend", code object version 3 and later).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace jax_mx {

struct KernelParameter {
  uint64_t offset = 0, size = 0;
  std::string kind;
};

struct KernelParameters {
  uint64_t bytes = 0;  // of the argument block
  std::vector<KernelParameter> list;
};

// Reads MessagePack from front to back. What is cut off, or of a kind that metadata has no use for,
// sets `failed`, and everything after it reads as nothing.
class MessagePack {
 public:
  explicit MessagePack(std::string_view bytes) : bytes_(bytes) {}
  bool failed() const { return failed_; }

  // The number of a map's pairs, 0 if what comes next is none.
  uint64_t Map() { return Count(0x80, 0xde); }
  // The number of an array's elements.
  uint64_t Array() { return Count(0x90, 0xdc); }

  std::string_view String() {
    const uint8_t tag = static_cast<uint8_t>(Big(1));
    const bool small = (tag & 0xe0) == 0xa0;
    if (!small && (tag < 0xd9 || tag > 0xdb)) return Fail(), std::string_view();
    return Take(small ? tag & 0x1f : Big(uint64_t{1} << (tag - 0xd9)));
  }

  uint64_t Unsigned() {
    const uint8_t tag = static_cast<uint8_t>(Big(1));
    if (tag < 0x80) return tag;
    if (tag < 0xcc || tag > 0xcf) return Fail(), 0;
    return Big(uint64_t{1} << (tag - 0xcc));
  }

  // Passes over one value with all that is in it.
  void Skip() {
    for (uint64_t left = 1; left > 0 && !failed_; --left) {
      if (at_ >= bytes_.size()) return Fail();
      const uint8_t tag = static_cast<uint8_t>(bytes_[at_]);
      if ((tag & 0xf0) == 0x80 || tag == 0xde || tag == 0xdf) {
        left += 2 * Map();
      } else if ((tag & 0xf0) == 0x90 || tag == 0xdc || tag == 0xdd) {
        left += Array();
      } else if ((tag & 0xe0) == 0xa0 || (tag >= 0xd9 && tag <= 0xdb)) {
        String();
      } else if (tag >= 0xca && tag <= 0xd3) {  // floats, then unsigned and signed integers
        constexpr int kWidth[] = {4, 8, 1, 2, 4, 8, 1, 2, 4, 8};
        Take(1 + kWidth[tag - 0xca]);
      } else if (tag < 0x80 || tag >= 0xe0 || tag == 0xc0 || tag == 0xc2 || tag == 0xc3) {
        Take(1);  // a small integer, nil, a boolean
      } else {
        Fail();
      }
    }
  }

 private:
  void Fail() {
    failed_ = true;
    at_ = bytes_.size();
  }

  std::string_view Take(uint64_t size) {
    if (size > bytes_.size() - at_) return Fail(), std::string_view();
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }

  uint64_t Big(uint64_t width) {
    uint64_t value = 0;
    for (char c : Take(width)) value = value << 8 | static_cast<uint8_t>(c);
    return value;
  }

  // At most one per byte that is left, so that a wrong count cannot keep anyone busy.
  uint64_t Count(uint8_t small, uint8_t wide) {
    const uint8_t tag = static_cast<uint8_t>(Big(1));
    uint64_t count = 0;
    if ((tag & 0xf0) == small)
      count = tag & 0x0f;
    else if (tag == wide || tag == wide + 1)
      count = Big(tag == wide ? 2 : 4);
    else
      Fail();
    if (count > bytes_.size() - at_) Fail();
    return failed_ ? 0 : count;
  }

  std::string_view bytes_;
  size_t at_ = 0;
  bool failed_ = false;
};

// The parameters of every kernel, by symbol; false when the metadata is missing or malformed.
// `image` is a whole ELF file (image.h).
inline bool ReadKernels(std::string_view image,
                        std::map<std::string, KernelParameters, std::less<>>* kernels) {
  auto read = [](std::string_view from, uint64_t at, size_t width) {
    uint64_t value = 0;
    if (at <= from.size() && width <= from.size() - at) std::memcpy(&value, &from[at], width);
    return value;
  };
  auto note = [&]() -> std::string_view {
    const uint64_t sections = read(image, 0x28, 8), width = read(image, 0x3a, 2);
    constexpr uint64_t kNote = 7, kMetadata = 32;  // SHT_NOTE, NT_AMDGPU_METADATA
    for (uint64_t i = 0; i < read(image, 0x3c, 2); ++i) {
      const uint64_t section = sections + i * width;
      if (read(image, section + 4, 4) != kNote) continue;
      auto notes = image.substr(read(image, section + 24, 8), read(image, section + 32, 8));
      while (notes.size() >= 12) {
        const uint64_t name = (read(notes, 0, 4) + 3) & ~uint64_t{3}, size = read(notes, 4, 4);
        const uint64_t next = 12 + name + ((size + 3) & ~uint64_t{3});
        if (12 + name + size > notes.size()) break;
        if (read(notes, 8, 4) == kMetadata && notes.substr(12, 6) == "AMDGPU")
          return notes.substr(12 + name, size);
        notes.remove_prefix(std::min<uint64_t>(next, notes.size()));
      }
    }
    return {};
  };

  MessagePack in(note());
  for (uint64_t i = in.Map(); i > 0; --i) {
    if (in.String() != "amdhsa.kernels") {
      in.Skip();
      continue;
    }
    for (uint64_t k = in.Array(); k > 0; --k) {
      std::string symbol;
      KernelParameters parameters;
      for (uint64_t j = in.Map(); j > 0; --j) {
        const std::string_view key = in.String();
        if (key == ".name") {
          symbol = in.String();
        } else if (key == ".kernarg_segment_size") {
          parameters.bytes = in.Unsigned();
        } else if (key == ".args") {
          parameters.list.resize(in.Array());
          for (KernelParameter& parameter : parameters.list) {
            for (uint64_t n = in.Map(); n > 0; --n) {
              const std::string_view what = in.String();
              if (what == ".offset")
                parameter.offset = in.Unsigned();
              else if (what == ".size")
                parameter.size = in.Unsigned();
              else if (what == ".value_kind")
                parameter.kind = in.String();
              else
                in.Skip();
            }
          }
        } else {
          in.Skip();
        }
      }
      (*kernels)[symbol] = std::move(parameters);
    }
  }
  return !in.failed() && !kernels->empty();
}

}  // namespace jax_mx
