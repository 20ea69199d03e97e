// One XLA FFI target that launches any precompiled kernel on XLA's stream.
//
// The call carries the kernel and everything that its launch needs; this file knows pointers,
// integers and dimensions, and nothing of what the kernel computes.
//
// Attribute `kernels`: a dictionary from a chip's name ("sm_90") to
//   image    the binary (ELF)                       sha256   of the image, hexadecimal
//   symbols  entry points of the image, comma-separated, the fastest first: all compute the same
//   align    i64[symbols x buffers]: what each buffer's address must be a multiple of for that
//            entry; the first entry that all addresses (and `divide`) satisfy is launched
//   divide   i64[k x 5]: (entry, buffer, from, to, divisor): the entry takes only a
//            prod(dims[from:to]) that the divisor divides
//   threads  i64[symbols x 3] per thread block
//   grid     i64[k x 5]: (3 * entry + axis, buffer, from, to, divisor): an entry's axis is the
//            product of its terms ceil(prod(dims[from:to]) / divisor); 1 without any
//   scalars  i64[k x 4]: per scalar (bytes, buffer, from, to): prod(dims[from:to]), 4 or 8 bytes
// Buffers are numbered operands first, then results. `from` and `to` count from the end when
// negative, and `to` is clamped to the rank, so one rule serves every rank, every shard and every
// vmap. Buffer -1 stands for the constant `from`. The kernel's parameters are the operands'
// pointers, the results' pointers, then the scalars. A grid axis of 0 launches nothing.
//
// Attribute `merge`, i64[k]: rules see the last k dimensions of a buffer as fewer, each the product
// of those that have the same number here; a buffer of a rank below k as it is.
//
// Attribute `absent`, i64[k]: the numbers, ascending, of operands that the kernel knows and the call
// does not have. Their pointers are null.
//
// Attribute `device`, on XLA's CPU platform only: the device of the stand-in driver, an i64.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "driver.h"
#include "image.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mx {
namespace {

namespace ffi = xla::ffi;
namespace nb = nanobind;

constexpr size_t kMaxBuffers = 12, kMaxScalars = 16;

ffi::Error Invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jax_mx: " + what);
}
ffi::Error Internal(const std::string& what) { return ffi::Error::Internal("jax_mx: " + what); }

// What tests read.
struct Counters {
  std::atomic<int64_t> libraries{0}, launches{0}, captured{0}, fallback_entries{0};
};
Counters counters;

// ---- what a call carries ---------------------------------------------------------------------
struct Extent {
  int64_t buffer, from, to;
};
struct Ratio {
  int64_t index;  // of an entry, or of its grid axis
  Extent extent;
  int64_t divisor;
};
struct Scalar {
  int64_t bytes;
  Extent extent;
};
struct Entry {
  std::string symbol;
  std::vector<int64_t> align;  // per buffer
  std::array<unsigned, 3> threads{};
};
struct Image;
struct Kernel {
  Image* image = nullptr;
  std::vector<Entry> entries;
  std::vector<Ratio> divide, grid;
  std::vector<Scalar> scalars;
  size_t buffers() const { return entries.front().align.size(); }
};

// A binary of this process and, once loaded, its library: one for all calls and devices.
struct Image {
  std::string sha256, bytes;
  std::mutex mutex;
  Handle library = nullptr;
};

// ---- the platforms: who launches --------------------------------------------------------------
struct Cuda {
  static constexpr std::string_view kStateName = "jax_mx_launch_cuda";
  static const Driver& driver() {
    static const auto* driver = new CudaDriver(Library::Open({"libcuda.so.1"}));
    return *driver;
  }
};

struct Rocm {
  static constexpr std::string_view kStateName = "jax_mx_launch_rocm";
  static const Driver& driver() {
    static const auto* driver = new HipDriver(
        Library::Open({"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}));
    return *driver;
  }
};

// XLA's CPU platform: a stand-in for a GPU's driver, that of tests or an emulator.
struct Host {
  static constexpr std::string_view kStateName = "jax_mx_launch_host";
  static inline std::function<const Driver*()> make = [] {
    return new CudaDriver(Library::None("no stand-in driver (jax_mx.testing.emulate)"));
  };
  static const Driver& driver() {
    static const Driver* driver = make();
    return *driver;
  }
};

template <typename Platform>
struct State {
  static inline ffi::TypeId id = {};
  static inline ffi::TypeInfo info = ffi::MakeTypeInfo<State>();

  struct Loaded {  // the kernel that fits a device
    const Kernel* kernel;
    std::vector<Handle> handles;  // per entry
  };
  std::map<std::string, Kernel, std::less<>> kernels;
  int32_t device = 0;  // of those that the host stands in for
  std::vector<int64_t> merge, absent;
  std::mutex mutex;
  std::map<const Kernel*, std::unique_ptr<Loaded>> loaded;
  std::array<std::atomic<const Loaded*>, kMaxDevices> ready{};  // per device
};

// ---- instantiate: when an executable is built or deserialized; needs no device -----------------
ffi::ErrorOr<Image*> Intern(std::string_view sha256, std::string_view bytes) {
  static std::mutex mutex;
  static auto* images = new std::map<std::string, std::unique_ptr<Image>, std::less<>>();
  std::lock_guard<std::mutex> lock(mutex);
  auto it = images->find(sha256);
  if (it != images->end() && it->second->bytes == bytes) return it->second.get();
  if (!IsWholeElf(bytes))
    return ffi::Unexpected(Invalid("image is not a whole 64-bit ELF file (truncated or corrupted)"));
  if (Sha256(bytes) != sha256)
    return ffi::Unexpected(Invalid("image does not have the sha256 " + std::string(sha256) +
                                   " that the call names (corrupted)"));
  auto image = std::make_unique<Image>();
  image->sha256 = sha256;
  image->bytes = bytes;
  return images->emplace(image->sha256, std::move(image)).first->second.get();
}

ffi::Error Parse(const ffi::Dictionary& attrs, Kernel* kernel) {
  using Ints = ffi::Span<const int64_t>;
  auto image = attrs.get<std::string_view>("image");
  auto sha256 = attrs.get<std::string_view>("sha256");
  auto symbols = attrs.get<std::string_view>("symbols");
  auto align = attrs.get<Ints>("align");
  auto divide = attrs.get<Ints>("divide");
  auto threads = attrs.get<Ints>("threads");
  auto grid = attrs.get<Ints>("grid");
  auto scalars = attrs.get<Ints>("scalars");
  if (!image.has_value() || !sha256.has_value() || !symbols.has_value() || !align.has_value() ||
      !divide.has_value() || !threads.has_value() || !grid.has_value() || !scalars.has_value())
    return Invalid("an attribute of the call is missing or has the wrong type");

  for (size_t at = 0; at <= symbols->size();) {
    const size_t comma = std::min(symbols->find(',', at), symbols->size());
    kernel->entries.push_back({std::string(symbols->substr(at, comma - at)), {}, {}});
    at = comma + 1;
  }
  const size_t entries = kernel->entries.size(), buffers = align->size() / entries;
  if (threads->size() != 3 * entries || divide->size() % 5 != 0 || grid->size() % 5 != 0 ||
      scalars->size() % 4 != 0 || buffers == 0 || align->size() != buffers * entries ||
      buffers > kMaxBuffers || scalars->size() / 4 > kMaxScalars)
    return Invalid("an attribute of the call has the wrong size");
  for (size_t i = 0; i < align->size(); ++i) {
    const int64_t a = align->begin()[i];
    if (a < 1) return Invalid("an alignment is not positive");
    kernel->entries[i / buffers].align.push_back(a);
  }
  auto is_buffer = [&](int64_t i) { return i >= -1 && i < static_cast<int64_t>(buffers); };
  for (size_t i = 0; i < threads->size(); ++i) {
    const int64_t count = threads->begin()[i];
    if (count < 1 || count > 1024) return Invalid("a thread count is out of range");
    kernel->entries[i / 3].threads[i % 3] = static_cast<unsigned>(count);
  }
  auto ratios = [&](const Ints& from, int64_t indices, std::vector<Ratio>* to) {
    for (const int64_t* r = from.begin(); r != from.end(); r += 5) {
      if (r[0] < 0 || r[0] >= indices || !is_buffer(r[1]) || r[4] < 1) return false;
      to->push_back({r[0], {r[1], r[2], r[3]}, r[4]});
    }
    return true;
  };
  const auto count = static_cast<int64_t>(entries);
  if (!ratios(*grid, 3 * count, &kernel->grid) || !ratios(*divide, count, &kernel->divide))
    return Invalid("the launch rule names an axis, entry, buffer or divisor out of range");
  for (size_t i = 0; i < scalars->size(); i += 4) {
    const int64_t* s = scalars->begin() + i;
    if ((s[0] != 4 && s[0] != 8) || !is_buffer(s[1]))
      return Invalid("a scalar is neither 4 nor 8 bytes wide, or names no buffer");
    kernel->scalars.push_back({s[0], {s[1], s[2], s[3]}});
  }
  auto interned = Intern(*sha256, *image);
  if (!interned.has_value()) return interned.error();
  kernel->image = *interned;
  return ffi::Error::Success();
}

template <typename Platform>
ffi::ErrorOr<std::unique_ptr<State<Platform>>> Instantiate(ffi::Dictionary attrs) {
  auto kernels = attrs.get<ffi::Dictionary>("kernels");
  if (!kernels.has_value() || kernels->size() == 0)
    return ffi::Unexpected(Invalid("the call has no attribute kernels"));
  auto state = std::make_unique<State<Platform>>();
  for (auto it = kernels->begin(); it != kernels->end(); ++it) {
    auto kernel = kernels->get<ffi::Dictionary>(*it);
    if (!kernel.has_value())
      return ffi::Unexpected(Invalid("an entry of kernels is not a dictionary"));
    if (ffi::Error error = Parse(*kernel, &state->kernels[std::string(*it)]);
        error.failure())
      return ffi::Unexpected(std::move(error));
  }
  if (auto device = attrs.get<int64_t>("device"); device.has_value())
    state->device = static_cast<int32_t>(*device);
  if (auto merge = attrs.get<ffi::Span<const int64_t>>("merge"); merge.has_value())
    state->merge.assign(merge->begin(), merge->end());
  for (int64_t group : state->merge)
    if (group < 0 || group >= static_cast<int64_t>(state->merge.size()))
      return ffi::Unexpected(Invalid("merge numbers a dimension out of range"));
  if (auto absent = attrs.get<ffi::Span<const int64_t>>("absent"); absent.has_value())
    state->absent.assign(absent->begin(), absent->end());
  for (size_t i = 0; i < state->absent.size(); ++i)
    if (state->absent[i] < 0 || state->absent[i] >= static_cast<int64_t>(kMaxBuffers) ||
        (i > 0 && state->absent[i] <= state->absent[i - 1]))
      return ffi::Unexpected(Invalid("absent is not ascending or out of range"));
  return state;
}

// ---- load: once per process (library), call site (kernels) and device (code) -------------------
template <typename Platform>
ffi::Error CheckParams(const Kernel& kernel, const Entry& entry, Handle handle) {
  const size_t buffers = kernel.buffers(), count = buffers + kernel.scalars.size();
  for (size_t i = 0; i <= count; ++i) {
    const int size = Platform::driver().ParamSize(handle, i);
    if (size < 0) break;
    const int64_t passed = i < buffers ? 8 : i < count ? kernel.scalars[i - buffers].bytes : 0;
    if (size != passed)
      return Invalid("parameter " + std::to_string(i) + " of " + entry.symbol + " takes " +
                     std::to_string(size) + " bytes, the call passes " + std::to_string(passed));
  }
  return ffi::Error::Success();
}

template <typename Platform>
ffi::Error Load(State<Platform>* state, int32_t device) {
  const auto& driver = Platform::driver();
  if (const Failure& why = driver.unusable(); !why.empty())
    return ffi::Error(ffi::ErrorCode::kUnavailable, "jax_mx: no GPU driver: " + why);
  if (device < 0 || static_cast<size_t>(device) >= kMaxDevices)
    return Invalid("device ordinal " + std::to_string(device) + " is not below " +
                   std::to_string(kMaxDevices));
  std::string arch;
  if (Failure f = driver.Arch(device, &arch); !f.empty()) return Internal(f);
  auto it = state->kernels.find(arch);
  if (it == state->kernels.end()) {
    std::string have;
    for (const auto& [name, kernel] : state->kernels) have += (have.empty() ? "" : ", ") + name;
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "jax_mx: the program holds kernels for " + have + ", this device is " + arch +
                          "; lower it for this device, or with implementation=\"xla\"");
  }
  const Kernel& kernel = it->second;
  std::lock_guard<std::mutex> lock(state->mutex);
  auto& loaded = state->loaded[&kernel];
  if (loaded == nullptr) {
    auto fresh = std::make_unique<typename State<Platform>::Loaded>();
    fresh->kernel = &kernel;
    std::lock_guard<std::mutex> image_lock(kernel.image->mutex);
    for (const Entry& entry : kernel.entries) {
      const std::string where =
          " (" + entry.symbol + ", image " + kernel.image->sha256.substr(0, 12) + ")";
      Handle& library = kernel.image->library;
      if (library == nullptr) {
        if (Failure f = driver.Load(kernel.image->bytes, &library); !f.empty()) {
          library = nullptr;
          return Internal(f + where);
        }
        ++counters.libraries;
      }
      Handle handle = nullptr;
      if (Failure f = driver.Kernel(library, entry.symbol.c_str(), &handle); !f.empty())
        return Internal(f + where);
      if (ffi::Error error = CheckParams<Platform>(kernel, entry, handle); error.failure())
        return error;
      fresh->handles.push_back(handle);
    }
    loaded = std::move(fresh);
  }
  for (Handle handle : loaded->handles)
    if (Failure f = driver.Prepare(handle, device); !f.empty())
      return Internal(f + " (" + kernel.entries.front().symbol + ")");
  state->ready[static_cast<size_t>(device)].store(loaded.get(), std::memory_order_release);
  return ffi::Error::Success();
}

template <typename Platform>
const typename State<Platform>::Loaded* Ready(const State<Platform>* state, int32_t device) {
  if (device < 0 || static_cast<size_t>(device) >= kMaxDevices) return nullptr;
  return state->ready[static_cast<size_t>(device)].load(std::memory_order_acquire);
}

// ---- initialize: before every run, never under capture, the device's context current -----------
template <typename Platform>
ffi::Error Initialize(State<Platform>* state, int32_t device) {
  if (Ready(state, device) != nullptr) return ffi::Error::Success();
  return Load(state, device);
}

// ---- execute: no allocation, synchronization or load -------------------------------------------
struct Buffers {
  size_t size = 0;
  std::array<void*, kMaxBuffers> data{};
  std::array<size_t, kMaxBuffers> bytes{};
  std::array<ffi::Span<const int64_t>, kMaxBuffers> dims{};
  const std::vector<int64_t>* merge = nullptr;

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

// The call that this thread is launching, for a stand-in driver: a real one is not told sizes.
struct Launching {
  const Buffers* buffers = nullptr;
  size_t operands = 0;
};
thread_local Launching launching;

// False when the extent does not lie within the buffer's rank or the product overflows.
bool Evaluate(const Extent& extent, const Buffers& buffers, int64_t* value) {
  *value = extent.from;
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

// The grid of an entry and the scalars; no thread blocks at all where an axis is 0.
struct Arguments {
  Grid grid;
  bool empty = false;
  std::array<int64_t, kMaxScalars> scalars{};
};

ffi::Error Follow(const Kernel& kernel, size_t index, const Buffers& buffers, Arguments* out) {
  const std::string& name = kernel.entries[index].symbol;
  std::array<int64_t, 3> blocks = {1, 1, 1};
  for (const Ratio& term : kernel.grid) {
    if (static_cast<size_t>(term.index) / 3 != index) continue;
    int64_t n = 0, &axis = blocks[static_cast<size_t>(term.index) % 3];
    if (!Evaluate(term.extent, buffers, &n) || n < 0 ||
        __builtin_mul_overflow(axis, n / term.divisor + (n % term.divisor != 0), &axis))
      return Invalid("grid axis " + std::to_string(term.index % 3) + " of " + name +
                     " does not fit the buffers");
  }
  out->grid.threads = kernel.entries[index].threads;
  out->empty = blocks[0] == 0 || blocks[1] == 0 || blocks[2] == 0;
  for (size_t i = 0; i < 3; ++i) {
    const int64_t most = i == 0 ? 0x7fffffff : 0xffff;
    if (blocks[i] > most)
      return Invalid("grid axis " + std::to_string(i) + " of " + name + " would need " +
                     std::to_string(blocks[i]) + " thread blocks, at most " +
                     std::to_string(most) + " fit");
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
  return ffi::Error::Success();
}

// Whether an entry takes these addresses and shapes.
bool Serves(const Kernel& kernel, size_t index, const Buffers& buffers) {
  const Entry& entry = kernel.entries[index];
  for (size_t i = 0; i < buffers.size; ++i)
    if (reinterpret_cast<uintptr_t>(buffers.data[i]) % static_cast<uintptr_t>(entry.align[i]))
      return false;
  for (const Ratio& wants : kernel.divide) {
    int64_t n = 0;
    if (static_cast<size_t>(wants.index) == index &&
        (!Evaluate(wants.extent, buffers, &n) || n % wants.divisor != 0))
      return false;
  }
  return true;
}

template <typename Platform>
ffi::Error Execute(State<Platform>* state, int32_t device, Handle stream, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  Buffers buffers;
  buffers.merge = &state->merge;
  bool fits = true;
  auto absent = state->absent.begin();
  const auto skip = [&] {
    for (; absent != state->absent.end() && *absent == static_cast<int64_t>(buffers.size); ++absent)
      fits &= buffers.Add();
  };
  for (size_t i = 0; i < args.size(); ++i) {
    skip();
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    fits &= buffers.Add(*buffer);
  }
  skip();
  if (absent != state->absent.end()) return Invalid("absent numbers a buffer beyond the operands");
  const size_t operands = buffers.size;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    fits &= buffers.Add(**buffer);
  }
  const auto* loaded = Ready(state, device);
  if (loaded == nullptr) {
    if (ffi::Error error = Load(state, device); error.failure()) return error;
    loaded = Ready(state, device);
  }
  const Kernel& kernel = *loaded->kernel;
  const std::string& name = kernel.entries.front().symbol;
  if (!fits || buffers.size != kernel.buffers())
    return Invalid(name + " takes " + std::to_string(kernel.buffers()) +
                   " buffers, the call passes " + std::to_string(buffers.size));
  size_t index = 0;
  while (index < kernel.entries.size() && !Serves(kernel, index, buffers)) ++index;
  if (index == kernel.entries.size())
    return Invalid("the buffers' addresses and shapes fit no entry of " + name);
  Arguments arguments;
  if (ffi::Error error = Follow(kernel, index, buffers, &arguments); error.failure()) return error;
  if (arguments.empty) return ffi::Error::Success();

  std::array<void*, kMaxBuffers + kMaxScalars> params{};
  size_t count = 0;
  for (size_t i = 0; i < buffers.size; ++i) params[count++] = &buffers.data[i];
  // Little-endian: 4 bytes are a value's low half.
  for (size_t i = 0; i < kernel.scalars.size(); ++i) params[count++] = &arguments.scalars[i];
  ++counters.launches;
  if (index != 0) ++counters.fallback_entries;
  if (Platform::driver().IsCapturing(stream)) ++counters.captured;
  launching = {&buffers, operands};
  Failure failure = Platform::driver().Launch(loaded->handles[index], device, arguments.grid,
                                              stream, params.data());
  launching = {};
  if (!failure.empty()) return Internal(failure + " (" + kernel.entries[index].symbol + ")");
  return ffi::Error::Success();
}

// ---- the three stages as XLA sees them ----------------------------------------------------------
// Registers the state's type when XLA asks for the handler's metadata: jaxlib's CPU client takes
// handlers before types and refuses a handler whose type it does not know, and then the whole
// backend does not start.
template <typename Platform>
XLA_FFI_Error* InstantiateStage(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr &&
      frame->extension_start->type == XLA_FFI_Extension_Metadata &&
      State<Platform>::id.type_id == 0) {
    XLA_FFI_Type_Register_Args args{};
    args.struct_size = XLA_FFI_Type_Register_Args_STRUCT_SIZE;
    args.name = {Platform::kStateName.data(), Platform::kStateName.size()};
    args.type_id = &State<Platform>::id;
    args.type_info = &State<Platform>::info;
    if (XLA_FFI_Error* error = frame->api->XLA_FFI_Type_Register(&args)) return error;
  }
  XLA_FFI_DEFINE_HANDLER(handler, Instantiate<Platform>, ffi::Ffi::BindInstantiate().Attrs());
  return (*handler)(frame);
}

XLA_FFI_DEFINE_HANDLER(kCudaInitialize, Initialize<Cuda>,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::State<State<Cuda>>>()
                           .Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(kCudaExecute, Execute<Cuda>,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<State<Cuda>>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER(kRocmInitialize, Initialize<Rocm>,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::State<State<Rocm>>>()
                           .Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(kRocmExecute, Execute<Rocm>,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<State<Rocm>>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Ctx<ffi::PlatformStream<void*>>()
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

// XLA's CPU client flushes subnormals on its threads; a stand-in computes with the usual mode.
ffi::Error ExecuteOnHost(State<Host>* state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  std::fenv_t mode;
  std::fegetenv(&mode);
  std::fesetenv(FE_DFL_ENV);
  ffi::Error error = Execute<Host>(state, state->device, /*stream=*/nullptr, args, rets);
  std::fesetenv(&mode);
  return error;
}
XLA_FFI_DEFINE_HANDLER(
    kHostExecute, ExecuteOnHost,
    ffi::Ffi::Bind().Ctx<ffi::State<State<Host>>>().RemainingArgs().RemainingRets());

nb::capsule Capsule(XLA_FFI_Handler* stage) {
  return nb::capsule(reinterpret_cast<void*>(stage));
}

}  // namespace
}  // namespace jax_mx

NB_MODULE(_ffi, m) {
  namespace nb = nanobind;
  using namespace jax_mx;
  m.doc() = "Launches precompiled kernels from XLA custom calls (see ffi/launch.cc).";
  m.attr("API_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def(
      "registrations",
      [] {
        nb::dict cuda, rocm, host, all;
        cuda["instantiate"] = Capsule(InstantiateStage<Cuda>);
        cuda["initialize"] = Capsule(kCudaInitialize);
        cuda["execute"] = Capsule(kCudaExecute);
        rocm["instantiate"] = Capsule(InstantiateStage<Rocm>);
        rocm["initialize"] = Capsule(kRocmInitialize);
        rocm["execute"] = Capsule(kRocmExecute);
        host["instantiate"] = Capsule(InstantiateStage<Host>);
        host["execute"] = Capsule(kHostExecute);
        all["CUDA"] = cuda;
        all["ROCM"] = rocm;
        all["cpu"] = host;
        return all;
      },
      "The handler's stages per platform, for jax.ffi.register_ffi_target.");
  m.def(
      "use_host_driver",
      [](const std::string& vendor, std::variant<std::string, Library::Functions> library) {
        const bool cuda = vendor == "cuda";
        if (!cuda && vendor != "hip") throw nb::value_error("the vendor is cuda or hip");
        Host::make = [cuda, library]() -> const Driver* {
          const auto* path = std::get_if<std::string>(&library);
          const Library found = path != nullptr ? Library::Open({*path})
                                                : Library::Of(std::get<Library::Functions>(library));
          if (cuda) return new CudaDriver(found);
          return new HipDriver(found);
        };
      },
      nb::arg("vendor"), nb::arg("library"),
      "What calls on XLA's CPU platform launch through; before the first of them. The library is a\n"
      "path, or the addresses of the driver's functions by name.");
  m.def(
      "launching",
      [] {
        nb::list out;
        for (size_t i = 0; launching.buffers != nullptr && i < launching.buffers->size; ++i)
          out.append(nb::make_tuple(reinterpret_cast<uintptr_t>(launching.buffers->data[i]),
                                    launching.buffers->bytes[i], i >= launching.operands));
        return out;
      },
      "(address, bytes, whether it is a result) of each buffer of the call that this thread is\n"
      "launching.");
  m.def(
      "counters",
      [] {
        nb::dict out;
        out["libraries"] = counters.libraries.load();
        out["launches"] = counters.launches.load();
        out["captured"] = counters.captured.load();
        out["fallback_entries"] = counters.fallback_entries.load();
        return out;
      },
      "Of this process: libraries loaded, launches, how many of these while a stream was captured\n"
      "into a graph, and how many took another entry than the fastest.");
}
