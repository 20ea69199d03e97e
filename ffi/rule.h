// The launch rule that a call carries for one chip: decoded from attributes when an executable is
// built, followed for the buffers of each run. launch.cc says what the attributes mean.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "driver.h"
#include "store.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mx {

namespace ffi = xla::ffi;

constexpr size_t kMaxBuffers = 16, kMaxScalars = 24, kMaxMaps = 8, kMaxParameters = 48,
                 kMaxScratch = 4, kMaxSummands = 8;
constexpr int64_t kConstant = -1, kMultiprocessors = -2;  // in the place of a buffer's number
constexpr int64_t kMaxZeros = 64;                         // bytes

inline ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jax_mx: " + what);
}
inline ffi::Error Internal(const std::string& what) {
  return ffi::Error::Internal("jax_mx: " + what);
}

// ---- what a call carries ---------------------------------------------------------------------
struct Extent {
  int64_t buffer, from, to;
};
// A factor of a size: ceil(extent / divisor).
struct Term {
  int64_t index;  // of an entry, of its grid axis, or of a scratch buffer
  Extent extent;
  int64_t divisor, summand;
};
struct Scalar {
  int64_t bytes;
  Extent extent;
};
// extent * times / divisor, which leaves no rest.
struct Length {
  Extent extent;
  int64_t times, divisor;
};
struct Map {
  size_t buffer;
  TensorMap like;  // what is known before the buffer is: all but address, dims and strides
  std::array<Length, TensorMap::kMaxRank> dims;
  std::array<Length, TensorMap::kMaxRank - 1> strides;
};
struct Scratch {
  size_t buffer;
  bool clear;
};
struct Parameter {
  enum Kind : int64_t { kPointer, kScalar, kMap, kZeros, kKinds };
  int64_t kind;
  size_t index;  // of a buffer, a scalar or a map
  int64_t bytes;
};
struct Entry {
  std::string symbol;
  std::vector<int64_t> align;  // per buffer
  std::array<unsigned, 3> threads{};
  Settings settings;
  std::vector<Parameter> parameters;
};
struct Kernel {
  std::string sha256;
  Image* image = nullptr;  // null until it is found
  std::vector<Entry> entries;
  std::vector<Term> divide, grid, scratch_bytes;
  std::vector<Scalar> scalars;
  std::vector<Map> maps;
  std::vector<Scratch> scratch;
  bool counts_multiprocessors = false;

  size_t buffers() const { return entries.front().align.size(); }
  const std::string& name() const { return entries.front().symbol; }
};

// The size of an element of a tensor map, by CUtensorMapDataType.
constexpr std::array<int64_t, 13> kElementBytes = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
// The most bytes of a box's row, by CUtensorMapSwizzle.
constexpr std::array<int64_t, 7> kSwizzledBytes = {0, 32, 64, 128, 128, 128, 128};

// Decodes one chip's kernel.
class Parser {
 public:
  Parser(const ffi::Dictionary& attrs, Kernel* kernel) : attrs_(attrs), kernel_(kernel) {}

  ffi::Error Parse() {
    auto sha256 = attrs_.get<std::string_view>("sha256");
    auto symbols = attrs_.get<std::string_view>("symbols");
    Ints align, threads, divide, grid, scalars, settings, maps, scratch, scratch_bytes, parameters;
    bool read = sha256.has_value() && symbols.has_value() && Read("align", &align, true) &&
                Read("threads", &threads, true);
    for (auto [name, to] : {std::pair("divide", &divide), std::pair("grid", &grid),
                            std::pair("scalars", &scalars), std::pair("settings", &settings),
                            std::pair("maps", &maps), std::pair("scratch", &scratch),
                            std::pair("scratch_bytes", &scratch_bytes),
                            std::pair("parameters", &parameters)})
      read = read && Read(name, to, false);
    if (!read) return Invalid("an attribute of the call is missing or has the wrong type");

    kernel_->sha256 = *sha256;
    for (size_t at = 0; at <= symbols->size();) {
      const size_t comma = std::min(symbols->find(',', at), symbols->size());
      kernel_->entries.emplace_back().symbol = symbols->substr(at, comma - at);
      at = comma + 1;
    }
    const size_t entries = kernel_->entries.size();
    buffers_ = align.size() / entries;
    if (threads.size() != 3 * entries || divide.size() % 5 != 0 || grid.size() % 6 != 0 ||
        scalars.size() % 4 != 0 || buffers_ == 0 || align.size() != buffers_ * entries ||
        buffers_ > kMaxBuffers || scalars.size() / 4 > kMaxScalars ||
        (settings.size() != 0 && settings.size() != 5 * entries) || scratch.size() % 2 != 0 ||
        scratch.size() / 2 > kMaxScratch || scratch_bytes.size() % 6 != 0 ||
        parameters.size() % 3 != 0)
      return Invalid("an attribute of the call has the wrong size");

    for (size_t i = 0; i < align.size(); ++i) {
      if (align[i] < 1) return Invalid("an alignment is not positive");
      kernel_->entries[i / buffers_].align.push_back(align[i]);
    }
    for (size_t i = 0; i < entries; ++i) {
      int64_t product = 1;
      for (size_t axis = 0; axis < 3; ++axis) {
        const int64_t count = threads[3 * i + axis];
        if (count < 1 || count > 1024) return Invalid("a thread count is out of range");
        kernel_->entries[i].threads[axis] = static_cast<unsigned>(count);
        product *= count;
      }
      if (product > 1024)
        return Invalid("a thread block of " + kernel_->entries[i].symbol + " has " +
                       std::to_string(product) + " threads, at most 1024 fit");
    }
    const auto count = static_cast<int64_t>(entries);
    const auto areas = static_cast<int64_t>(scratch.size() / 2);
    if (!Terms(grid, 6, 3 * count, &kernel_->grid) ||
        !Terms(divide, 5, count, &kernel_->divide) ||
        !Terms(scratch_bytes, 6, areas, &kernel_->scratch_bytes))
      return Invalid(
          "the launch rule names an axis, entry, buffer, divisor or summand out of range");
    for (size_t i = 0; i < scalars.size(); i += 4) {
      if ((scalars[i] != 4 && scalars[i] != 8) || !IsExtent(scalars[i + 1]))
        return Invalid("a scalar is neither 4 nor 8 bytes wide, or names no buffer");
      kernel_->scalars.push_back({scalars[i], {scalars[i + 1], scalars[i + 2], scalars[i + 3]}});
    }
    if (ffi::Error error = Ask(settings); error.failure()) return error;
    if (ffi::Error error = Maps(maps); error.failure()) return error;
    if (ffi::Error error = Areas(scratch); error.failure()) return error;
    return Parameters(parameters);
  }

 private:
  struct Ints {
    const int64_t* data = nullptr;
    size_t count = 0;
    size_t size() const { return count; }
    int64_t operator[](size_t i) const { return data[i]; }
  };

  // An array that is not there is an empty one, unless it is required.
  bool Read(const char* name, Ints* to, bool required) const {
    if (!attrs_.contains(name)) return !required;
    auto span = attrs_.get<ffi::Span<const int64_t>>(name);
    if (!span.has_value()) return false;
    *to = {span->begin(), span->size()};
    return true;
  }

  bool IsBuffer(int64_t i) const { return i >= 0 && i < static_cast<int64_t>(buffers_); }

  bool IsExtent(int64_t buffer) const {
    if (buffer == kMultiprocessors) kernel_->counts_multiprocessors = true;
    return IsBuffer(buffer) || buffer == kConstant || buffer == kMultiprocessors;
  }

  // Sorted, so that the factors of a summand and the summands of a size follow each other.
  bool Terms(const Ints& from, size_t width, int64_t indices, std::vector<Term>* to) const {
    for (size_t i = 0; i < from.size(); i += width) {
      const int64_t summand = width == 6 ? from[i + 5] : 0;
      if (from[i] < 0 || from[i] >= indices || !IsExtent(from[i + 1]) || from[i + 4] < 1 ||
          summand < 0 || summand >= static_cast<int64_t>(kMaxSummands))
        return false;
      to->push_back({from[i], {from[i + 1], from[i + 2], from[i + 3]}, from[i + 4], summand});
    }
    std::stable_sort(to->begin(), to->end(), [](const Term& a, const Term& b) {
      return std::pair(a.index, a.summand) < std::pair(b.index, b.summand);
    });
    return true;
  }

  ffi::Error Ask(const Ints& settings) {
    constexpr int64_t kMostShared = 1 << 30, kMostBlocks = 16;
    for (size_t i = 0; i < settings.size(); i += 5) {
      Entry& entry = kernel_->entries[i / 5];
      if (settings[i] < 0 || settings[i] > kMostShared)
        return Invalid("the shared memory of " + entry.symbol + " is out of range");
      entry.settings.shared = static_cast<unsigned>(settings[i]);
      int64_t blocks = 1;
      for (size_t axis = 0; axis < 3; ++axis) {
        const int64_t n = settings[i + 1 + axis];
        if (n < 1 || n > kMostBlocks || (blocks *= n) > kMostBlocks)
          return Invalid("a cluster of " + entry.symbol + " is not 1 to 16 thread blocks");
        entry.settings.cluster[axis] = static_cast<unsigned>(n);
      }
      if (settings[i + 4] < 0 || settings[i + 4] > 1)
        return Invalid("early start of " + entry.symbol + " is neither 0 nor 1");
      entry.settings.early_start = settings[i + 4] == 1;
    }
    return ffi::Error::Success();
  }

  ffi::Error Maps(const Ints& maps) {
    for (size_t at = 0; at < maps.size();) {
      const std::string name = "tensor map " + std::to_string(kernel_->maps.size());
      if (kernel_->maps.size() == kMaxMaps)
        return Invalid("a kernel has more than " + std::to_string(kMaxMaps) + " tensor maps");
      if (maps.size() - at < 6) return Invalid("attribute maps of the call has the wrong size");
      const int64_t buffer = maps[at], type = maps[at + 1], rank = maps[at + 2];
      const int64_t swizzle = maps[at + 3], promotion = maps[at + 4], fill = maps[at + 5];
      if (!IsBuffer(buffer)) return Invalid(name + " is of no buffer");
      if (type < 0 || type >= static_cast<int64_t>(kElementBytes.size()))
        return Invalid(name + " has an unknown element type");
      if (rank < 1 || rank > static_cast<int64_t>(TensorMap::kMaxRank))
        return Invalid(name + " has not 1 to 5 dimensions");
      if (swizzle < 0 || swizzle >= static_cast<int64_t>(kSwizzledBytes.size()) || promotion < 0 ||
          promotion > 3 || fill < 0 || fill > 1)
        return Invalid(name + " has an unknown swizzle, promotion or fill");
      if (fill == 1 && type < 6) return Invalid(name + " fills integers with NaN");
      at += 6;
      const auto n = static_cast<size_t>(rank);
      if (maps.size() - at < 6 * n + 5 * (n - 1))
        return Invalid("attribute maps of the call has the wrong size");
      Map& map = kernel_->maps.emplace_back();
      map.buffer = static_cast<size_t>(buffer);
      map.like.type = static_cast<int>(type);
      map.like.rank = static_cast<unsigned>(rank);
      map.like.swizzle = static_cast<int>(swizzle);
      map.like.promotion = static_cast<int>(promotion);
      map.like.fill = static_cast<int>(fill);
      auto length = [&](Length* to) {
        *to = {{maps[at], maps[at + 1], maps[at + 2]}, maps[at + 3], maps[at + 4]};
        at += 5;
        return IsExtent(to->extent.buffer) && to->times >= 1 && to->divisor >= 1;
      };
      const std::string out_of_range = name + " names a buffer, factor or divisor out of range";
      for (size_t i = 0; i < n; ++i) {
        if (!length(&map.dims[i])) return Invalid(out_of_range);
        const int64_t box = maps[at++];
        if (box < 1 || box > 256)
          return Invalid(name + " has a box of " + std::to_string(box) + " elements, not 1 to 256");
        map.like.box[i] = static_cast<uint32_t>(box);
      }
      for (size_t i = 0; i + 1 < n; ++i)
        if (!length(&map.strides[i])) return Invalid(out_of_range);
      const int64_t row = map.like.box[0] * kElementBytes[static_cast<size_t>(type)];
      if (row % 16 != 0)
        return Invalid(name + " has a box with rows of " + std::to_string(row) +
                       " bytes, which 16 does not divide");
      const int64_t most = kSwizzledBytes[static_cast<size_t>(swizzle)];
      if (swizzle != 0 && row > most)
        return Invalid(name + " has a box with rows of " + std::to_string(row) +
                       " bytes, its swizzle takes at most " + std::to_string(most));
    }
    return ffi::Error::Success();
  }

  ffi::Error Areas(const Ints& scratch) {
    for (size_t i = 0; i < scratch.size(); i += 2) {
      const auto index = static_cast<int64_t>(i / 2);
      auto sized = [&](const Term& term) { return term.index == index; };
      if (!IsBuffer(scratch[i]) || scratch[i + 1] < 0 || scratch[i + 1] > 1)
        return Invalid("scratch names a buffer out of range, or is neither cleared nor not");
      if (std::none_of(kernel_->scratch_bytes.begin(), kernel_->scratch_bytes.end(), sized))
        return Invalid("a scratch buffer has no size");
      kernel_->scratch.push_back({static_cast<size_t>(scratch[i]), scratch[i + 1] == 1});
    }
    return ffi::Error::Success();
  }

  ffi::Error Parameters(const Ints& rows) {
    for (size_t i = 0; i < rows.size(); i += 3) {
      const int64_t entry = rows[i], kind = rows[i + 1], index = rows[i + 2];
      if (entry < 0 || entry >= static_cast<int64_t>(kernel_->entries.size()) || kind < 0 ||
          kind >= Parameter::kKinds)
        return Invalid("a parameter has an entry or kind out of range");
      const std::array<size_t, 3> counts = {buffers_, kernel_->scalars.size(),
                                            kernel_->maps.size()};
      const bool zeros = kind == Parameter::kZeros;
      if (zeros ? index < 1 || index > kMaxZeros
                : index < 0 || index >= static_cast<int64_t>(counts[static_cast<size_t>(kind)]))
        return Invalid("a parameter is of no buffer, scalar or tensor map, or not 1 to " +
                       std::to_string(kMaxZeros) + " bytes of zeros");
      auto& parameters = kernel_->entries[static_cast<size_t>(entry)].parameters;
      if (parameters.size() == kMaxParameters)
        return Invalid("an entry has more than " + std::to_string(kMaxParameters) + " parameters");
      Add(kind, static_cast<size_t>(index), &parameters);
    }
    for (Entry& entry : kernel_->entries) {
      if (!entry.parameters.empty()) continue;
      for (size_t i = 0; i < buffers_; ++i) Add(Parameter::kPointer, i, &entry.parameters);
      for (size_t i = 0; i < kernel_->scalars.size(); ++i)
        Add(Parameter::kScalar, i, &entry.parameters);
    }
    return ffi::Error::Success();
  }

  void Add(int64_t kind, size_t index, std::vector<Parameter>* to) const {
    const int64_t bytes = kind == Parameter::kPointer  ? 8
                          : kind == Parameter::kScalar ? kernel_->scalars[index].bytes
                          : kind == Parameter::kMap    ? static_cast<int64_t>(TensorMap::kBytes)
                                                       : static_cast<int64_t>(index);
    to->push_back({kind, index, bytes});
  }

  const ffi::Dictionary& attrs_;
  Kernel* kernel_;
  size_t buffers_ = 0;
};

// ---- what a run passes -------------------------------------------------------------------------
struct Buffers {
  size_t size = 0, operands = 0;  // operands come first
  std::array<void*, kMaxBuffers> data{};
  std::array<size_t, kMaxBuffers> bytes{};
  std::array<ffi::Span<const int64_t>, kMaxBuffers> dims{};
  const std::vector<int64_t>* merge = nullptr;
  int64_t multiprocessors = 0;  // of the device

  bool Add() {  // one that the call does not have
    if (size == kMaxBuffers) return false;
    ++size;
    return true;
  }
  bool Add(const ffi::AnyBuffer& buffer) {
    if (size == kMaxBuffers) return false;
    data[size] = buffer.untyped_data();
    bytes[size] = buffer.size_bytes();
    dims[size++] = buffer.dimensions();
    return true;
  }
};

// False when the extent does not lie within the buffer's rank or the product overflows.
inline bool Evaluate(const Extent& extent, const Buffers& buffers, int64_t* value) {
  *value = extent.buffer == kMultiprocessors ? buffers.multiprocessors : extent.from;
  if (extent.buffer < 0) return true;
  const auto& dims = buffers.dims[static_cast<size_t>(extent.buffer)];
  const int64_t size = static_cast<int64_t>(dims.size());
  const int64_t merged = static_cast<int64_t>(buffers.merge->size());
  const int64_t alone = size < merged ? size : size - merged;  // before the merged ones
  const auto at = [&](int64_t i) {
    return i < alone ? i : alone + (*buffers.merge)[static_cast<size_t>(i - alone)];
  };
  int64_t rank = alone;
  for (int64_t i = alone; i < size; ++i) rank = std::max(rank, at(i) + 1);
  const int64_t from = extent.from < 0 ? extent.from + rank : extent.from;
  const int64_t to = extent.to < 0 ? extent.to + rank : std::min(extent.to, rank);
  if (from < 0 || from > to) return false;  // and so from <= to <= rank
  *value = 1;
  for (int64_t i = 0; i < size; ++i)
    if (from <= at(i) && at(i) < to && __builtin_mul_overflow(*value, dims.begin()[i], value))
      return false;
  return true;
}

// The size that the terms of `index` make up: the sum over summands of the product of factors; 1
// without terms. False when a factor is negative or does not fit the buffers, or on overflow.
inline bool Sum(const std::vector<Term>& terms, int64_t index, const Buffers& buffers,
                int64_t* sum) {
  int64_t product = 0, summand = -1;
  *sum = 0;
  for (const Term& term : terms) {
    if (term.index != index) continue;
    if (term.summand != summand) {
      if (__builtin_add_overflow(*sum, product, sum)) return false;
      product = 1;
      summand = term.summand;
    }
    int64_t n = 0;
    if (!Evaluate(term.extent, buffers, &n) || n < 0 ||
        __builtin_mul_overflow(product, n / term.divisor + (n % term.divisor != 0), &product))
      return false;
  }
  if (summand < 0) product = 1;
  return !__builtin_add_overflow(*sum, product, sum);
}

// False when the length does not fit the buffers, or leaves a rest.
inline bool Evaluate(const Length& length, const Buffers& buffers, int64_t* value) {
  if (!Evaluate(length.extent, buffers, value) ||
      __builtin_mul_overflow(*value, length.times, value) || *value % length.divisor != 0)
    return false;
  *value /= length.divisor;
  return true;
}

// Whether an entry takes these addresses and shapes.
inline bool Serves(const Kernel& kernel, size_t index, const Buffers& buffers) {
  const Entry& entry = kernel.entries[index];
  for (size_t i = 0; i < buffers.size; ++i)
    if (reinterpret_cast<uintptr_t>(buffers.data[i]) % static_cast<uintptr_t>(entry.align[i]))
      return false;
  for (const Term& wants : kernel.divide) {
    int64_t n = 0;
    if (static_cast<size_t>(wants.index) == index &&
        (!Evaluate(wants.extent, buffers, &n) || n % wants.divisor != 0))
      return false;
  }
  return true;
}

// What a launch passes beside the buffers; no thread blocks at all where an axis is 0.
struct Arguments {
  Grid grid;
  bool empty = false;
  std::array<int64_t, kMaxScalars> scalars{};
  std::array<TensorMap, kMaxMaps> maps{};         // those that the entry takes
  std::array<int64_t, kMaxScratch> scratch{};     // bytes
};

// A tensor map of a buffer, or why there can be none.
inline ffi::Error Follow(const Map& map, const std::string& name, const Buffers& buffers,
                         TensorMap* out) {
  constexpr int64_t kMostDim = int64_t{1} << 32, kMostStride = int64_t{1} << 40;
  *out = map.like;
  out->address = buffers.data[map.buffer];
  const int64_t element = kElementBytes[static_cast<size_t>(map.like.type)];
  int64_t end = element;
  bool inside = true;
  for (size_t i = 0; i < map.like.rank; ++i) {
    int64_t dim = 0, stride = element;
    if (!Evaluate(map.dims[i], buffers, &dim) || dim < 1 || dim > kMostDim)
      return Invalid("dimension " + std::to_string(i) + " of " + name + " is not 1 to 2^32");
    if (i > 0 && (!Evaluate(map.strides[i - 1], buffers, &stride) || stride < 0 ||
                  stride >= kMostStride || stride % 16 != 0))
      return Invalid("stride " + std::to_string(i) + " of " + name +
                     " is not a multiple of 16 bytes below 2^40");
    out->dims[i] = static_cast<uint64_t>(dim);
    if (i > 0) out->strides[i - 1] = static_cast<uint64_t>(stride);
    int64_t reach = 0;
    inside = inside && !__builtin_mul_overflow(dim - 1, stride, &reach) &&
             !__builtin_add_overflow(end, reach, &end);
  }
  if (!inside || static_cast<uint64_t>(end) > buffers.bytes[map.buffer])
    return Invalid(name + " reaches beyond its buffer");
  const auto address = reinterpret_cast<uintptr_t>(out->address);
  if (address == 0 || address % 16 != 0)
    return Invalid("the address of the buffer of " + name + " is not a multiple of 16 bytes");
  return ffi::Error::Success();
}

// Everything of a launch that follows from the buffers, for one entry.
inline ffi::Error Follow(const Kernel& kernel, size_t index, const Buffers& buffers,
                         Arguments* out) {
  const Entry& entry = kernel.entries[index];
  const std::string& name = entry.symbol;
  out->grid.threads = entry.threads;
  std::array<int64_t, 3> blocks{};
  for (size_t i = 0; i < 3; ++i) {
    if (!Sum(kernel.grid, static_cast<int64_t>(3 * index + i), buffers, &blocks[i]))
      return Invalid("grid axis " + std::to_string(i) + " of " + name +
                     " does not fit the buffers");
    out->empty = out->empty || blocks[i] == 0;
  }
  for (size_t i = 0; i < 3; ++i) {
    const int64_t most = i == 0 ? 0x7fffffff : 0xffff;
    if (blocks[i] > most)
      return Invalid("grid axis " + std::to_string(i) + " of " + name + " would need " +
                     std::to_string(blocks[i]) + " thread blocks, at most " +
                     std::to_string(most) + " fit");
    if (blocks[i] % entry.settings.cluster[i] != 0)
      return Invalid("grid axis " + std::to_string(i) + " of " + name + " has " +
                     std::to_string(blocks[i]) + " thread blocks, which clusters of " +
                     std::to_string(entry.settings.cluster[i]) + " do not divide");
    out->grid.blocks[i] = static_cast<unsigned>(blocks[i]);
  }
  for (size_t i = 0; i < kernel.scalars.size(); ++i) {
    const Scalar& scalar = kernel.scalars[i];
    int64_t& value = out->scalars[i];
    if (!Evaluate(scalar.extent, buffers, &value) ||
        (scalar.bytes == 4 && value != static_cast<int32_t>(value)))
      return Invalid("scalar " + std::to_string(i) + " of " + name + " does not fit " +
                     std::to_string(scalar.bytes) + " bytes");
  }
  if (out->empty) return ffi::Error::Success();
  for (size_t i = 0; i < kernel.scratch.size(); ++i) {
    const size_t buffer = kernel.scratch[i].buffer;
    if (buffer < buffers.operands)
      return Invalid("scratch buffer " + std::to_string(i) + " of " + name +
                     " is an operand, not a result");
    if (!Sum(kernel.scratch_bytes, static_cast<int64_t>(i), buffers, &out->scratch[i]))
      return Invalid("the size of scratch buffer " + std::to_string(i) + " of " + name +
                     " does not fit the buffers");
    if (static_cast<uint64_t>(out->scratch[i]) > buffers.bytes[buffer])
      return Invalid("scratch buffer " + std::to_string(i) + " of " + name + " needs " +
                     std::to_string(out->scratch[i]) + " bytes, the call passes " +
                     std::to_string(buffers.bytes[buffer]));
  }
  for (const Parameter& parameter : entry.parameters) {
    if (parameter.kind != Parameter::kMap) continue;
    const std::string what = "tensor map " + std::to_string(parameter.index) + " of " + name;
    ffi::Error error = Follow(kernel.maps[parameter.index], what, buffers,
                              &out->maps[parameter.index]);
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

}  // namespace jax_mx
