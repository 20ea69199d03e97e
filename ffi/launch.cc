// One XLA FFI target that launches any compiled kernel, or several, on XLA's stream.
//
// The call carries the kernel's name and everything that its launch needs; this file knows
// pointers, integers and dimensions, and nothing of what the kernel computes.
// jax_mx/launch/rule.py writes these attributes.
//
// Attributes of the call
//
//   abi      i64: the version of all that this comment says, 3. Version 2, which this
//            handler launches too, had no steps. A call without it is of version 1, which this
//            handler does not launch.
//   kernels  a dictionary from a chip's name ("sm_90") to that chip's kernel, a dictionary itself.
//   merge    i64[k], optional: rules see the last k dimensions of a buffer as fewer, each the
//            product of those that have the same number here; a buffer of a rank below k as it is.
//   absent   i64[k], optional: the numbers, ascending, of operands that the kernel knows and the
//            call does not have. Their pointers are null.
//   device   i64, on XLA's CPU platform only: the device of the stand-in driver.
//
//   steps    a dictionary, in place of kernels, merge and absent: a call of several launches, one
//            after the other on the stream, named "0", "1" and so on. Each is a dictionary of
//            kernels, and of:
//     operands  i64[k]: for each of the kernel's operands its number in the call, which counts the
//               call's operands, then its results; -1: it has none, and the pointer is null. So a
//               launch reads what one ahead of it wrote.
//     results   i64[k]: for each of the kernel's results its number in the call.
//
// Buffers are numbered operands first, then results; absent operands count.
//
// An extent is three integers (buffer, from, to): the product of the buffer's dimensions
// dims[from:to]. `from` and `to` count from the end when negative, and `to` is clamped to the rank,
// so one rule serves every rank, every shard and every vmap. Buffer -1 stands for the constant
// `from`, buffer -2 for the number of the device's multiprocessors.
//
// A size is a sum of products. It has a row for each factor, which ends with (buffer, from, to,
// divisor, summand). A factor is ceil(extent / divisor); factors of the same summand, 0 to 7, are
// multiplied, and the products are added. (A divisor beyond any extent makes a factor 0 for an
// empty buffer and 1 for any other.)
//
// A length is five integers (buffer, from, to, times, divisor): extent * times / divisor, which
// must leave no rest.
//
// Attributes of a kernel. An optional array that is not there is an empty one.
//
//   sha256   of the binary, hexadecimal.
//   image    the binary (an ELF file); optional. Without it the binary is looked for by its sha256,
//            first among those that this process has, then in the folders of `use_store`, when the
//            executable is built and again when it is loaded. A binary that is nowhere is an error:
//            when the executable is built, if none of the call's kernels has one; else on a device
//            whose kernel has none.
//   symbols  entry points of the binary, comma-separated, the fastest first: all compute the same.
//   align    i64[symbols x buffers]: what each buffer's address must be a multiple of for that
//            entry; the first entry that all addresses (and `divide`) satisfy is launched.
//   divide   i64[k x 5], optional: (entry, buffer, from, to, divisor): the entry takes only an
//            extent that the divisor divides.
//   threads  i64[symbols x 3] per thread block, 1024 at most.
//   grid     i64[k x 6], optional: (3 * entry + axis, then a factor): an entry's axis is a size; 1
//            without any factor. Where an axis is 0 nothing is launched.
//   scalars  i64[k x 4], optional: (bytes, then an extent): an integer of 4 or 8 bytes.
//   maps     i64[k], optional: CUDA's tensor maps, one after the other. Each is (buffer, element
//            type, rank, swizzle, L2 promotion, fill), then for each dimension, the fastest first,
//            its length in elements and its box (6 integers), then for each dimension but the first
//            its stride, a length in bytes. Type, swizzle, promotion and fill are the numbers of
//            cuTensorMapEncodeTiled. Element strides are 1. A map lies within its buffer.
//   parameters  i64[k x 3], optional: (entry, kind, index): an entry's parameters in the kernel's
//            order. Kind 0 is the pointer to buffer `index`, 1 is scalar `index`, 2 is tensor map
//            `index`, by value, 3 is `index` bytes of zeros (which a compiler declares and no
//            kernel reads). An entry without any takes the operands' pointers, the results'
//            pointers, then the scalars.
//   settings  i64[symbols x 5], optional: (bytes of dynamic shared memory, the cluster's thread
//            blocks along three axes, whether the entry may start before the call's launch ahead of
//            it has ended: CUDA's programmatic dependent launch). 0, 1, 1, 1, 0 without. The first
//            launch of a call starts when all before it in the stream has ended, and so does one
//            that clears scratch.
//   scratch  i64[k x 2], optional: (buffer, clear): a result of the call that is the kernel's
//            workspace. It must have at least the bytes that `scratch_bytes` says; if `clear` is 1
//            these are set to zero on the stream before the launch.
//   scratch_bytes  i64[k x 6], optional: (index of the scratch buffer, then a factor): the size of
//            each scratch buffer in bytes.
//
// HIP has no tensor maps, no clusters and no early start: such an entry is an error when loaded.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <deque>
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
#include "rule.h"
#include "store.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mx {
namespace {

namespace nb = nanobind;

constexpr int64_t kAbi = 3, kOldestAbi = 2;

// What tests read.
struct Counters {
  std::atomic<int64_t> libraries{0}, launches{0}, captured{0}, fallback_entries{0}, cleared{0},
      encoded{0};
};
Counters counters;

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

// One launch of a call: its kernel for each chip, and the buffers that it takes.
struct Step {
  struct Loaded {  // the kernel that fits a device
    const Kernel* kernel;
    std::vector<Handle> handles;  // per entry
  };
  std::map<std::string, Kernel, std::less<>> kernels;
  std::vector<int64_t> merge, absent;
  bool wired = false;  // whether `operands` and `results` name its buffers; else it has the call's
  std::vector<int64_t> operands, results;
  std::mutex mutex;
  std::map<const Kernel*, std::unique_ptr<Loaded>> loaded;
  std::array<std::atomic<const Loaded*>, kMaxDevices> ready{};  // per device
  std::array<int64_t, kMaxDevices> multiprocessors{};           // written before `ready`
};

template <typename Platform>
struct State {
  static inline ffi::TypeId id = {};
  static inline ffi::TypeInfo info = ffi::MakeTypeInfo<State>();

  std::deque<Step> steps;  // in the order of their launches
  int32_t device = 0;      // of those that the host stands in for
};

// ---- instantiate: when an executable is built or deserialized; needs no device -----------------
ffi::Error CheckVersion(const ffi::Dictionary& attrs) {
  int64_t version = 1;
  if (attrs.contains("abi")) {
    auto abi = attrs.get<int64_t>("abi");
    if (!abi.has_value()) return Invalid("attribute abi of the call is not an i64");
    version = *abi;
  }
  if (kOldestAbi <= version && version <= kAbi) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    "jax_mx: the program calls kernels by version " + std::to_string(version) +
                        " of jax_mx's launch attributes, the jax_mx installed here launches "
                        "versions " +
                        std::to_string(kOldestAbi) + " to " + std::to_string(kAbi) +
                        "; export or lower the program again with this jax_mx, or install the "
                        "jax_mx that it was exported with");
}

// What binaries that are nowhere are, and where they were looked for.
ffi::Error NotFound(const std::vector<std::pair<std::string, const Kernel*>>& missing) {
  std::string what;
  std::vector<std::string> hashes;
  for (const auto& [chip, kernel] : missing) {
    what += (what.empty() ? "" : ", ") + kernel->name() + " (sha256 " + kernel->sha256 + ") for " +
            chip;
    hashes.push_back(kernel->sha256);
  }
  return ffi::Error(ffi::ErrorCode::kNotFound, "jax_mx: no binary is found of " + what + "; " +
                                                   Store::Get().Searched(hashes));
}

// The binary that the call carries, else the one that is found by its sha256, if there is one.
ffi::Error Resolve(const ffi::Dictionary& attrs, Kernel* kernel) {
  if (!attrs.contains("image")) {
    kernel->image = Store::Get().Find(kernel->sha256);
    return ffi::Error::Success();
  }
  auto image = attrs.get<std::string_view>("image");
  if (!image.has_value())
    return Invalid("an attribute of the call is missing or has the wrong type");
  Failure failure = Store::Get().Intern(kernel->sha256, *image, &kernel->image);
  return failure.empty() ? ffi::Error::Success() : Invalid(failure);
}

// Reads an attribute that may be missing; false when it has another type.
template <typename T>
bool Optional(const ffi::Dictionary& attrs, const char* name, T* to) {
  if (!attrs.contains(name)) return true;
  auto value = attrs.get<T>(name);
  if (value.has_value()) *to = *value;
  return value.has_value();
}

ffi::Error NoDevice(int64_t device) {
  return Invalid("device ordinal " + std::to_string(device) + " is not 0 to " +
                 std::to_string(kMaxDevices - 1));
}

bool AreFrom(int64_t least, const std::vector<int64_t>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [&](int64_t n) { return n >= least; });
}

bool AreBelow(size_t end, const std::vector<int64_t>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(),
                     [&](int64_t n) { return n < static_cast<int64_t>(end); });
}

// Reads a launch: the attributes of a call, or of one of its `steps`.
ffi::Error Read(const ffi::Dictionary& attrs, Step* step) {
  auto kernels = attrs.get<ffi::Dictionary>("kernels");
  if (!kernels.has_value() || kernels->size() == 0)
    return Invalid("the call has no attribute kernels");
  for (auto it = kernels->begin(); it != kernels->end(); ++it) {
    auto kernel = kernels->get<ffi::Dictionary>(*it);
    if (!kernel.has_value()) return Invalid("an entry of kernels is not a dictionary");
    Kernel& own = step->kernels[std::string(*it)];
    if (ffi::Error error = Parser(*kernel, &own).Parse(); error.failure()) return error;
    if (ffi::Error error = Resolve(*kernel, &own); error.failure()) return error;
  }
  std::vector<std::pair<std::string, const Kernel*>> missing;
  for (const auto& [chip, kernel] : step->kernels)
    if (kernel.image == nullptr) missing.emplace_back(chip, &kernel);
  if (missing.size() == step->kernels.size()) return NotFound(missing);
  for (auto [name, to] : {std::pair("merge", &step->merge), std::pair("absent", &step->absent),
                          std::pair("operands", &step->operands),
                          std::pair("results", &step->results)}) {
    ffi::Span<const int64_t> numbers;
    if (!Optional(attrs, name, &numbers))
      return Invalid(std::string("attribute ") + name + " has the wrong type");
    to->assign(numbers.begin(), numbers.end());
  }
  if (!AreFrom(0, step->merge) || !AreBelow(step->merge.size(), step->merge))
    return Invalid("merge numbers a dimension out of range");
  if (!AreFrom(0, step->absent) || !AreBelow(kMaxBuffers, step->absent) ||
      std::adjacent_find(step->absent.begin(), step->absent.end(), std::greater_equal<>()) !=
          step->absent.end())
    return Invalid("absent is not ascending or out of range");
  if (!AreFrom(-1, step->operands) || !AreFrom(0, step->results))
    return Invalid("operands or results number a buffer out of range");
  return ffi::Error::Success();
}

template <typename Platform>
ffi::ErrorOr<std::unique_ptr<State<Platform>>> Instantiate(ffi::Dictionary attrs) {
  if (ffi::Error error = CheckVersion(attrs); error.failure())
    return ffi::Unexpected(std::move(error));
  auto state = std::make_unique<State<Platform>>();
  int64_t device = 0;
  if (!Optional(attrs, "device", &device))
    return ffi::Unexpected(Invalid("attribute device has the wrong type"));
  if (device < 0 || device >= static_cast<int64_t>(kMaxDevices))
    return ffi::Unexpected(NoDevice(device));
  state->device = static_cast<int32_t>(device);
  if (!attrs.contains("steps")) {
    if (ffi::Error error = Read(attrs, &state->steps.emplace_back()); error.failure())
      return ffi::Unexpected(std::move(error));
    return state;
  }
  auto steps = attrs.get<ffi::Dictionary>("steps");
  if (!steps.has_value() || steps->size() == 0)
    return ffi::Unexpected(Invalid("steps is not a dictionary of launches"));
  for (size_t i = 0; i < steps->size(); ++i) {
    auto step = steps->get<ffi::Dictionary>(std::to_string(i));
    if (!step.has_value())
      return ffi::Unexpected(Invalid("steps has no launch " + std::to_string(i)));
    Step& own = state->steps.emplace_back();
    own.wired = true;
    if (ffi::Error error = Read(*step, &own); error.failure())
      return ffi::Unexpected(std::move(error));
  }
  return state;
}

// ---- load: once per process (library), call site (kernels) and device (code) -------------------
template <typename Platform>
ffi::Error CheckParams(const Entry& entry, Handle handle) {
  const size_t count = entry.parameters.size();
  for (size_t i = 0; i <= count; ++i) {
    const int size = Platform::driver().ParamSize(handle, i);
    if (size < 0) break;
    const int64_t passed = i < count ? entry.parameters[i].bytes : 0;
    if (size != passed)
      return Invalid("parameter " + std::to_string(i) + " of " + entry.symbol + " takes " +
                     std::to_string(size) + " bytes, the call passes " + std::to_string(passed));
  }
  return ffi::Error::Success();
}

// Whether the driver has what the launch takes beside a kernel.
Failure CheckDriver(const Driver& driver, const Kernel& kernel) {
  for (const Entry& entry : kernel.entries)
    for (const Parameter& parameter : entry.parameters)
      if (parameter.kind == Parameter::kMap)
        if (Failure f = driver.CannotEncode(); !f.empty()) return f;
  for (const Scratch& scratch : kernel.scratch)
    if (scratch.clear)
      if (Failure f = driver.CannotClear(); !f.empty()) return f;
  return {};
}

const Step::Loaded* Ready(const Step& step, int32_t device) {
  if (device < 0 || static_cast<size_t>(device) >= kMaxDevices) return nullptr;
  return step.ready[static_cast<size_t>(device)].load(std::memory_order_acquire);
}

template <typename Platform>
ffi::Error Load(Step* step, int32_t device) {
  const auto& driver = Platform::driver();
  if (const Failure& why = driver.unusable(); !why.empty())
    return ffi::Error(ffi::ErrorCode::kUnavailable, "jax_mx: no GPU driver: " + why);
  if (device < 0 || static_cast<size_t>(device) >= kMaxDevices) return NoDevice(device);
  std::string chip;
  if (Failure f = driver.Chip(device, &chip); !f.empty()) return Internal(f);
  auto it = step->kernels.find(chip);
  if (it == step->kernels.end()) {
    std::string have;
    for (const auto& [name, kernel] : step->kernels) have += (have.empty() ? "" : ", ") + name;
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "jax_mx: the program holds kernels for " + have + ", this device is " + chip +
                          "; lower it for this device, or with implementation=\"xla\"");
  }
  std::lock_guard<std::mutex> lock(step->mutex);
  if (Ready(*step, device) != nullptr) return ffi::Error::Success();
  Kernel& kernel = it->second;
  if (kernel.image == nullptr) kernel.image = Store::Get().Find(kernel.sha256);
  if (kernel.image == nullptr) return NotFound({{chip, &kernel}});
  const auto where = [&](const Entry& entry) {
    return " (" + entry.symbol + ", image " + kernel.sha256.substr(0, 12) + ")";
  };
  auto& loaded = step->loaded[&kernel];
  if (loaded == nullptr) {
    if (Failure f = CheckDriver(driver, kernel); !f.empty())
      return Internal(f + where(kernel.entries.front()));
    auto fresh = std::make_unique<Step::Loaded>();
    fresh->kernel = &kernel;
    std::lock_guard<std::mutex> image_lock(kernel.image->mutex);
    for (const Entry& entry : kernel.entries) {
      Handle& library = kernel.image->library;
      if (library == nullptr) {
        if (Failure f = driver.Load(kernel.image->bytes, &library); !f.empty()) {
          library = nullptr;
          return Internal(f + where(entry));
        }
        ++counters.libraries;
      }
      Handle handle = nullptr;
      if (Failure f = driver.Kernel(library, entry.symbol.c_str(), &handle); !f.empty())
        return Internal(f + where(entry));
      if (ffi::Error error = CheckParams<Platform>(entry, handle); error.failure()) return error;
      fresh->handles.push_back(handle);
    }
    loaded = std::move(fresh);
  }
  for (size_t i = 0; i < kernel.entries.size(); ++i)
    if (Failure f = driver.Prepare(loaded->handles[i], device, kernel.entries[i].settings);
        !f.empty())
      return Internal(f + where(kernel.entries[i]));
  const auto index = static_cast<size_t>(device);
  if (kernel.counts_multiprocessors) {
    int64_t& count = step->multiprocessors[index];
    if (Failure f = driver.Multiprocessors(device, &count); !f.empty()) return Internal(f);
    if (count < 1) return Internal("the driver does not say how many multiprocessors there are");
  }
  step->ready[index].store(loaded.get(), std::memory_order_release);
  return ffi::Error::Success();
}

// ---- initialize: before every run, never under capture, the device's context current -----------
template <typename Platform>
ffi::Error Initialize(State<Platform>* state, int32_t device) {
  for (Step& step : state->steps)
    if (Ready(step, device) == nullptr)
      if (ffi::Error error = Load<Platform>(&step, device); error.failure()) return error;
  return ffi::Error::Success();
}

// ---- execute: no allocation, synchronization or load -------------------------------------------
// The call that this thread is launching, for a stand-in driver: a real one is not told sizes.
thread_local const Buffers* launching = nullptr;

// The buffers of a launch: the call's, but for absent ones; or those that it numbers.
ffi::Error Gather(const Step& step, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                  Buffers* to, bool* fits) {
  const auto add = [&](size_t i) -> ffi::Error {
    if (i < args.size()) {
      auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer.has_value()) return buffer.error();
      *fits &= to->Add(*buffer);
    } else {
      auto buffer = rets.get<ffi::AnyBuffer>(i - args.size());
      if (!buffer.has_value()) return buffer.error();
      *fits &= to->Add(**buffer);
    }
    return ffi::Error::Success();
  };
  const size_t size = args.size() + rets.size();
  *fits = true;
  to->merge = &step.merge;
  if (step.wired) {
    for (const auto* numbers : {&step.operands, &step.results}) {
      for (int64_t i : *numbers) {
        if (i >= static_cast<int64_t>(size))
          return Invalid("a launch takes buffer " + std::to_string(i) + ", the call has " +
                         std::to_string(size));
        if (i < 0) {
          *fits &= to->Add();
        } else if (ffi::Error error = add(static_cast<size_t>(i)); error.failure()) {
          return error;
        }
      }
      if (numbers == &step.operands) to->operands = to->size;
    }
    return ffi::Error::Success();
  }
  auto absent = step.absent.begin();
  const auto skip = [&] {
    for (; absent != step.absent.end() && *absent == static_cast<int64_t>(to->size); ++absent)
      *fits &= to->Add();
  };
  for (size_t i = 0; i <= size; ++i) {
    if (i <= args.size()) skip();
    if (i == args.size()) to->operands = to->size;
    if (i == size) break;
    if (ffi::Error error = add(i); error.failure()) return error;
  }
  if (absent != step.absent.end()) return Invalid("absent numbers a buffer beyond the operands");
  return ffi::Error::Success();
}

template <typename Platform>
ffi::Error Launch(Step* step, int32_t device, Handle stream, const ffi::RemainingArgs& args,
                  const ffi::RemainingRets& rets, bool* launched) {
  Buffers buffers;
  bool fits = true;
  if (ffi::Error error = Gather(*step, args, rets, &buffers, &fits); error.failure()) return error;
  const auto* loaded = Ready(*step, device);
  if (loaded == nullptr) {
    if (ffi::Error error = Load<Platform>(step, device); error.failure()) return error;
    loaded = Ready(*step, device);
  }
  const Kernel& kernel = *loaded->kernel;
  if (!fits || buffers.size != kernel.buffers())
    return Invalid(kernel.name() + " takes " + std::to_string(kernel.buffers()) +
                   " buffers, the call passes " + std::to_string(buffers.size));
  buffers.multiprocessors = step->multiprocessors[static_cast<size_t>(device)];
  size_t index = 0;
  while (index < kernel.entries.size() && !Serves(kernel, index, buffers)) ++index;
  if (index == kernel.entries.size())
    return Invalid("the buffers' addresses and shapes fit no entry of " + kernel.name());
  Arguments arguments;
  if (ffi::Error error = Follow(kernel, index, buffers, &arguments); error.failure()) return error;
  if (arguments.empty) return ffi::Error::Success();

  const auto& driver = Platform::driver();
  const Entry& entry = kernel.entries[index];
  const auto internal = [&](const Failure& failure) {
    return Internal(failure + " (" + entry.symbol + ")");
  };
  static constexpr std::array<char, kMaxZeros> kNothing{};
  struct alignas(64) Encoded {
    std::array<char, TensorMap::kBytes> bytes;
  };
  std::array<Encoded, kMaxMaps> encoded;
  std::array<void*, kMaxParameters> params{};
  for (size_t i = 0; i < entry.parameters.size(); ++i) {
    const auto& [kind, at, bytes] = entry.parameters[i];
    if (kind == Parameter::kPointer) {
      params[i] = &buffers.data[at];
    } else if (kind == Parameter::kScalar) {
      params[i] = &arguments.scalars[at];  // little-endian: 4 bytes are a value's low half
    } else if (kind == Parameter::kMap) {
      params[i] = &encoded[at];
      if (Failure f = driver.Encode(arguments.maps[at], &encoded[at]); !f.empty())
        return internal(f);
      ++counters.encoded;
    } else {
      params[i] = const_cast<char*>(kNothing.data());
    }
  }
  bool cleared = false;
  for (size_t i = 0; i < kernel.scratch.size(); ++i) {
    if (!kernel.scratch[i].clear || arguments.scratch[i] == 0) continue;
    void* const address = buffers.data[kernel.scratch[i].buffer];
    if (Failure f = driver.Clear(address, static_cast<size_t>(arguments.scratch[i]), stream);
        !f.empty())
      return internal(f);
    ++counters.cleared;
    cleared = true;
  }
  ++counters.launches;
  if (index != 0) ++counters.fallback_entries;
  if (driver.IsCapturing(stream)) ++counters.captured;
  Settings settings = entry.settings;
  settings.early_start &= *launched && !cleared;
  launching = &buffers;
  Failure failure =
      driver.Launch(loaded->handles[index], device, arguments.grid, settings, stream, params.data());
  launching = nullptr;
  *launched = true;
  return failure.empty() ? ffi::Error::Success() : internal(failure);
}

template <typename Platform>
ffi::Error Execute(State<Platform>* state, int32_t device, Handle stream, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  bool launched = false;
  for (Step& step : state->steps) {
    ffi::Error error = Launch<Platform>(&step, device, stream, args, rets, &launched);
    if (error.failure()) return error;
  }
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
  m.attr("ABI") = kAbi;
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
      "use_store",
      [](std::vector<std::string> folders, std::string advice) {
        Store::Get().Use(std::move(folders), std::move(advice));
      },
      nb::arg("folders"), nb::arg("advice"),
      "Where calls that carry no binary find it, in this order: as the file <folder>/<sha256>,\n"
      "whose contents are checked. Replaces the folders of an earlier call. The advice, a clause,\n"
      "ends the error about a binary that is nowhere.");
  m.def(
      "intern",
      [](const std::string& sha256, nb::bytes image) {
        Image* ignored = nullptr;
        Failure f = Store::Get().Intern(sha256, {image.c_str(), image.size()}, &ignored);
        if (!f.empty()) throw nb::value_error(("jax_mx: " + f).c_str());
      },
      nb::arg("sha256"), nb::arg("image"),
      "Takes a binary into the process, where calls that carry none find it.\n\n"
      "Raises ValueError: it is no whole ELF file, or has another sha256.");
  m.def(
      "launching",
      [] {
        nb::list out;
        for (size_t i = 0; launching != nullptr && i < launching->size; ++i)
          out.append(nb::make_tuple(reinterpret_cast<uintptr_t>(launching->data[i]),
                                    launching->bytes[i], i >= launching->operands));
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
        out["encoded"] = counters.encoded.load();
        out["cleared"] = counters.cleared.load();
        out["read_from_store"] = Store::Get().read.load();
        return out;
      },
      "Of this process: libraries loaded, launches, how many of these while a stream was captured\n"
      "into a graph, and how many took another entry than the fastest; tensor maps encoded,\n"
      "scratch buffers cleared, and binaries read from the folders of use_store.");
}
