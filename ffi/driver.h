// The few driver calls that a launch needs, taken at run time from the vendor's own library.
//
// Nothing is linked: a machine without the library imports jax_mx and gets an error only when a
// kernel is to run. A vendor is a Driver; launch.cc knows no vendor.
#pragma once

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "code_object.h"

namespace jax_mx {

constexpr size_t kMaxDevices = 64;

using Handle = void*;

// What went wrong, in the driver's words; empty when nothing did.
using Failure = std::string;

struct Grid {
  std::array<unsigned, 3> blocks;
  std::array<unsigned, 3> threads;
};

// What an entry asks for beside a grid.
struct Settings {
  unsigned shared = 0;                           // bytes of dynamic shared memory per thread block
  std::array<unsigned, 3> cluster = {1, 1, 1};  // thread blocks
  bool early_start = false;  // may start before the call's launch ahead of it has ended

  unsigned blocks() const { return cluster[0] * cluster[1] * cluster[2]; }
  bool extended() const { return blocks() > 1 || early_start; }
};

// A tensor map's contents; the numbers are those of cuTensorMapEncodeTiled. Element strides are 1,
// and nothing is interleaved.
struct TensorMap {
  static constexpr size_t kBytes = 128, kMaxRank = 5;

  int type = 0, swizzle = 0, promotion = 0, fill = 0;
  unsigned rank = 0;
  void* address = nullptr;
  std::array<uint64_t, kMaxRank> dims{};         // elements, the fastest dimension first
  std::array<uint64_t, kMaxRank - 1> strides{};  // bytes, from the second dimension on
  std::array<uint32_t, kMaxRank> box{};          // elements
};

// Where a driver's functions come from.
struct Library {
  using Functions = std::map<std::string, uintptr_t>;  // addresses by name

  std::string name;
  std::function<void*(const char* symbol)> find;
  Failure failure;

  static Library None(Failure why) { return {"", nullptr, std::move(why)}; }

  // The version that the process has, whose streams XLA passes; else the first of these names that
  // the system has.
  static Library Open(std::initializer_list<std::string> names) {
    std::string why;
    for (int loaded : {names.size() > 1 ? RTLD_NOLOAD : 0, 0})
      for (const std::string& name : names) {
        if (Handle handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | loaded))
          return {name, [handle](const char* symbol) { return dlsym(handle, symbol); }, ""};
        const char* error = dlerror();
        if (loaded == 0 && why.empty() && error != nullptr) why = error;
      }
    return None(why);
  }

  static Library Of(Functions functions) {
    auto find = [functions = std::move(functions)](const char* symbol) {
      auto it = functions.find(symbol);
      return reinterpret_cast<void*>(it == functions.end() ? 0 : it->second);
    };
    return {"the stand-in", find, ""};
  }
};

// A vendor's driver. Handles are its own.
class Driver {
 public:
  virtual ~Driver() = default;

  // Why no call can be made; empty when calls can.
  const Failure& unusable() const { return unusable_; }

  // As launch/chips.py names it: "sm_90" for compute capability 9.0, "gfx950".
  virtual Failure Chip(int device, std::string* chip) const = 0;

  // One library serves every device of the process. The image is whole, and stays.
  virtual Failure Load(std::string_view image, Handle* library) const = 0;
  virtual Failure Kernel(Handle library, const char* symbol, Handle* kernel) const = 0;

  // Brings the code to the device, whose context is current, and allows what the entry asks for.
  // The first launch would bring the code, which must not happen while a stream is being captured.
  virtual Failure Prepare(Handle kernel, int device, const Settings& settings) const = 0;

  // How many thread blocks of the largest size run at once: the device's multiprocessors.
  virtual Failure Multiprocessors(int device, int64_t* count) const = 0;

  // The size of the kernel's parameter `index`; 0: there is none, -1: the driver cannot say.
  virtual int ParamSize(Handle kernel, size_t index) const = 0;

  virtual bool IsCapturing(Handle stream) const = 0;

  // Why `Encode` and `Clear` are not to be had; empty when they are.
  virtual Failure CannotEncode() const = 0;
  virtual Failure CannotClear() const = 0;

  // Writes the map's 128 bytes to `out`, an address that 64 divides. Asks no device.
  virtual Failure Encode(const TensorMap& map, void* out) const = 0;

  // Zeros on the stream.
  virtual Failure Clear(void* address, size_t bytes, Handle stream) const = 0;

  // `kernel` has been prepared for `device`; `params` point at its parameters' values.
  virtual Failure Launch(Handle kernel, int device, const Grid& grid, const Settings& settings,
                         Handle stream, void** params) const = 0;

 protected:
  // Looks a function up; one that is missing makes the driver unusable if it is required.
  template <typename Function>
  void Find(const Library& library, Function& function, const char* symbol, bool required = true) {
    if (!library.failure.empty()) {
      unusable_ = library.failure;
      return;
    }
    name_ = library.name;
    function = reinterpret_cast<Function>(library.find(symbol));
    if (function == nullptr && required) unusable_ = Missing(symbol);
  }

  Failure Missing(const char* symbol) const {
    return name_ + " has no " + symbol + "; update the GPU driver";
  }

  Failure unusable_;

 private:
  std::string name_;  // of the library
};

class CudaDriver : public Driver {
 public:
  explicit CudaDriver(const Library& library) {
    Find(library, init_, "cuInit");
    Find(library, error_name_, "cuGetErrorName");
    Find(library, error_string_, "cuGetErrorString");
    Find(library, device_get_, "cuDeviceGet");
    Find(library, device_attribute_, "cuDeviceGetAttribute");
    Find(library, library_load_, "cuLibraryLoadData");
    Find(library, library_kernel_, "cuLibraryGetKernel");
    Find(library, kernel_function_, "cuKernelGetFunction");
    Find(library, kernel_param_, "cuKernelGetParamInfo", /*required=*/false);  // CUDA 12.4
    Find(library, kernel_get_, "cuKernelGetAttribute", /*required=*/false);
    Find(library, kernel_set_, "cuKernelSetAttribute", /*required=*/false);
    Find(library, encode_, "cuTensorMapEncodeTiled", /*required=*/false);
    Find(library, clear_, "cuMemsetD8Async", /*required=*/false);
    Find(library, is_capturing_, "cuStreamIsCapturing");
    Find(library, launch_, "cuLaunchKernel");
    Find(library, launch_extended_, "cuLaunchKernelEx", /*required=*/false);
    if (unusable_.empty()) unusable_ = Check(init_(0), "cuInit");
  }

  Failure Chip(int ordinal, std::string* chip) const override {
    int major = 0, minor = 0;
    if (Failure f = Attribute(ordinal, kMajor, &major); !f.empty()) return f;
    if (Failure f = Attribute(ordinal, kMinor, &minor); !f.empty()) return f;
    *chip = "sm_" + std::to_string(10 * major + minor);
    return {};
  }

  Failure Multiprocessors(int ordinal, int64_t* count) const override {
    int found = 0;
    Failure f = Attribute(ordinal, kMultiprocessors, &found);
    *count = found;
    return f;
  }

  // The driver is not told the image's size.
  Failure Load(std::string_view image, Handle* library) const override {
    return Check(library_load_(library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                 "cuLibraryLoadData");
  }

  Failure Kernel(Handle library, const char* symbol, Handle* kernel) const override {
    return Check(library_kernel_(kernel, library, symbol), "cuLibraryGetKernel");
  }

  Failure Prepare(Handle kernel, int ordinal, const Settings& settings) const override {
    if (Failure f = Allow(kernel, ordinal, settings); !f.empty()) return f;
    Handle function = nullptr;
    return Check(kernel_function_(&function, kernel), "cuKernelGetFunction");
  }

  Failure CannotEncode() const override {
    return encode_ == nullptr ? Missing("cuTensorMapEncodeTiled") : Failure();
  }

  Failure CannotClear() const override {
    return clear_ == nullptr ? Missing("cuMemsetD8Async") : Failure();
  }

  Failure Encode(const TensorMap& map, void* out) const override {
    constexpr std::array<uint32_t, TensorMap::kMaxRank> kOnes = {1, 1, 1, 1, 1};
    return Check(encode_(out, map.type, map.rank, map.address, map.dims.data(),
                         map.strides.data(), map.box.data(), kOnes.data(), /*interleave=*/0,
                         map.swizzle, map.promotion, map.fill),
                 "cuTensorMapEncodeTiled");
  }

  Failure Clear(void* address, size_t bytes, Handle stream) const override {
    return Check(clear_(reinterpret_cast<uint64_t>(address), 0, bytes, stream), "cuMemsetD8Async");
  }

  int ParamSize(Handle kernel, size_t index) const override {
    if (kernel_param_ == nullptr) return -1;
    size_t offset = 0, size = 0;
    return kernel_param_(kernel, index, &offset, &size) == 0 ? static_cast<int>(size) : 0;
  }

  bool IsCapturing(Handle stream) const override {
    int status = 0;
    return stream != nullptr && is_capturing_(stream, &status) == 0 && status != 0;
  }

  Failure Launch(Handle kernel, int, const Grid& grid, const Settings& settings, Handle stream,
                 void** params) const override {
    const auto& [x, y, z] = grid.blocks;
    const auto& [tx, ty, tz] = grid.threads;
    if (!settings.extended())
      return Check(launch_(kernel, x, y, z, tx, ty, tz, settings.shared, stream, params, nullptr),
                   "cuLaunchKernel");
    std::array<LaunchAttribute, 2> attributes{};
    unsigned count = 0;
    if (settings.blocks() > 1) {
      attributes[count].id = kClusterDimension;
      std::memcpy(attributes[count++].value, settings.cluster.data(), sizeof settings.cluster);
    }
    // A driver without cuKernelGetParamInfo is older than CUDA 12.4; graphs of CUDA 12.2 and before
    // cannot have an early start.
    if (settings.early_start && kernel_param_ != nullptr) {
      attributes[count].id = kProgrammaticStreamSerialization;
      attributes[count++].value[0] = 1;
    }
    const LaunchConfig config = {x,  y, z, tx, ty, tz, settings.shared, stream, attributes.data(),
                                 count};
    return Check(launch_extended_(&config, kernel, params, nullptr), "cuLaunchKernelEx");
  }

 private:
  using Result = int;  // CUresult

  // CUdevice_attribute, CUfunction_attribute, CUlaunchAttributeID
  static constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kMostShared = 97,
                       kLaunchesClusters = 120;
  static constexpr int kStaticShared = 1, kDynamicShared = 8, kUnusualCluster = 14;
  static constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6;
  static constexpr unsigned kUsualCluster = 8;  // thread blocks that every device can launch

  struct LaunchAttribute {
    alignas(8) int id;
    alignas(8) unsigned value[16];
  };
  struct LaunchConfig {
    unsigned x, y, z, tx, ty, tz, shared;
    Handle stream;
    const LaunchAttribute* attributes;
    unsigned count;
  };
  static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

  Failure Attribute(int ordinal, int attribute, int* value) const {
    int device = 0;
    if (Failure f = Check(device_get_(&device, ordinal), "cuDeviceGet"); !f.empty()) return f;
    return Check(device_attribute_(value, attribute, device), "cuDeviceGetAttribute");
  }

  // Kernels have no more than 48 KB of shared memory and clusters of 8 unless they are allowed it.
  Failure Allow(Handle kernel, int ordinal, const Settings& settings) const {
    if (settings.extended() && launch_extended_ == nullptr) return Missing("cuLaunchKernelEx");
    if (settings.blocks() > 1) {
      int able = 0;
      if (Failure f = Attribute(ordinal, kLaunchesClusters, &able); !f.empty()) return f;
      if (able == 0) return "the device launches no clusters of thread blocks";
    }
    const bool unusual = settings.blocks() > kUsualCluster;
    if (settings.shared == 0 && !unusual) return {};
    if (kernel_set_ == nullptr) return Missing("cuKernelSetAttribute");
    if (kernel_get_ == nullptr) return Missing("cuKernelGetAttribute");
    int device = 0;
    if (Failure f = Check(device_get_(&device, ordinal), "cuDeviceGet"); !f.empty()) return f;
    if (unusual) {
      Failure f =
          Check(kernel_set_(kUnusualCluster, 1, kernel, device), "cuKernelSetAttribute");
      if (!f.empty()) return f;
    }
    if (settings.shared == 0) return {};
    int most = 0, own = 0, allowed = 0;
    if (Failure f = Attribute(ordinal, kMostShared, &most); !f.empty()) return f;
    // One at a time: calls of the same kernel may ask for more or less, and what is allowed to one
    // must not be taken away by another.
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto [attribute, value] : {std::pair(kStaticShared, &own),
                                    std::pair(kDynamicShared, &allowed)}) {
      Failure f = Check(kernel_get_(value, attribute, kernel, device), "cuKernelGetAttribute");
      if (!f.empty()) return f;
    }
    if (int64_t{settings.shared} + own > most)
      return "the kernel needs " + std::to_string(int64_t{settings.shared} + own) +
             " bytes of shared memory, the device has " + std::to_string(most) +
             " for a thread block";
    const int wanted = static_cast<int>(settings.shared);
    if (wanted <= allowed) return {};
    return Check(kernel_set_(kDynamicShared, wanted, kernel, device), "cuKernelSetAttribute");
  }

  Failure Check(Result result, const char* call) const {
    if (result == 0) return {};
    const char *name = "unknown error", *text = "";
    error_name_(result, &name);
    error_string_(result, &text);
    return std::string(call) + ": " + name + " (" + text + ")";
  }

  Result (*init_)(unsigned) = nullptr;
  Result (*error_name_)(Result, const char**) = nullptr;
  Result (*error_string_)(Result, const char**) = nullptr;
  Result (*device_get_)(int*, int) = nullptr;
  Result (*device_attribute_)(int*, int, int) = nullptr;
  Result (*library_load_)(Handle*, const void*, Handle, Handle, unsigned, Handle, Handle,
                          unsigned) = nullptr;
  Result (*library_kernel_)(Handle*, Handle, const char*) = nullptr;
  Result (*kernel_function_)(Handle*, Handle) = nullptr;
  Result (*kernel_param_)(Handle, size_t, size_t*, size_t*) = nullptr;
  Result (*kernel_get_)(int*, int, Handle, int) = nullptr;
  Result (*kernel_set_)(int, int, Handle, int) = nullptr;
  Result (*encode_)(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                    const uint32_t*, int, int, int, int) = nullptr;
  Result (*clear_)(uint64_t, unsigned char, size_t, Handle) = nullptr;
  Result (*is_capturing_)(Handle, int*) = nullptr;
  Result (*launch_)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                    Handle, void**, void**) = nullptr;
  Result (*launch_extended_)(const LaunchConfig*, Handle, void**, void**) = nullptr;
  mutable std::mutex mutex_;
};

class HipDriver : public Driver {
 public:
  explicit HipDriver(const Library& library) {
    Find(library, init_, "hipInit");
    Find(library, error_name_, "hipGetErrorName");
    Find(library, error_string_, "hipGetErrorString");
    // The structure that the function fills has been this one since ROCm 6.0.
    Find(library, properties_, "hipGetDevicePropertiesR0600");
    Find(library, set_device_, "hipSetDevice");
    Find(library, module_load_, "hipModuleLoadData");
    Find(library, module_function_, "hipModuleGetFunction");
    Find(library, clear_, "hipMemsetAsync", /*required=*/false);
    Find(library, is_capturing_, "hipStreamIsCapturing");
    Find(library, launch_, "hipModuleLaunchKernel");
    if (unusable_.empty()) unusable_ = Check(init_(0), "hipInit");
  }

  Failure Chip(int device, std::string* chip) const override {
    Properties properties{};
    if (Failure f = Read(device, &properties); !f.empty()) return f;
    constexpr size_t kName = 1160, kNameSize = 256;  // gcnArchName
    const std::string_view name(&properties[kName], strnlen(&properties[kName], kNameSize));
    *chip = name.substr(0, name.find(':'));  // "gfx942:sramecc+:xnack-"
    return {};
  }

  Failure Multiprocessors(int device, int64_t* count) const override {
    constexpr size_t kMultiprocessors = 388;  // multiProcessorCount
    Properties properties{};
    if (Failure f = Read(device, &properties); !f.empty()) return f;
    *count = Number<int>(properties, kMultiprocessors);
    return {};
  }

  // HIP loads a module for one device, so that waits for Prepare.
  Failure Load(std::string_view image, Handle* library) const override {
    std::map<std::string, KernelParameters, std::less<>> kernels;
    if (!ReadKernels(image, &kernels)) return "the code object's metadata is missing or malformed";
    auto loaded = std::make_unique<Image>();
    loaded->bytes = image;
    for (auto& [symbol, parameters] : kernels) {
      Entry& entry = loaded->entries[symbol];
      entry.image = loaded.get();
      entry.symbol = symbol;
      entry.parameters = std::move(parameters);
    }
    *library = loaded.release();
    return {};
  }

  Failure Kernel(Handle library, const char* symbol, Handle* kernel) const override {
    auto& entries = static_cast<Image*>(library)->entries;
    auto it = entries.find(symbol);
    if (it == entries.end()) return "the code object's metadata names no such kernel";
    const KernelParameters& parameters = it->second.parameters;
    if (parameters.bytes > kMaxArguments)
      return "the kernel takes more than " + std::to_string(kMaxArguments) + " bytes";
    for (const KernelParameter& p : parameters.list)
      if ((p.kind != "global_buffer" && p.kind != "by_value") || p.size == 0 || p.size > 8 ||
          p.offset > parameters.bytes || p.size > parameters.bytes - p.offset)
        return "the kernel has a parameter of the kind " + p.kind + " at " +
               std::to_string(p.offset) + ", which no launch passes";
    *kernel = &it->second;
    return {};
  }

  Failure Prepare(Handle kernel, int device, const Settings& settings) const override {
    if (settings.blocks() > 1) return "HIP launches no clusters of thread blocks";
    if (settings.early_start)
      return "HIP starts no kernel before the one that precedes it has ended";
    if (settings.shared != 0) {
      constexpr size_t kShared = 296;  // sharedMemPerBlock
      Properties properties{};
      if (Failure f = Read(device, &properties); !f.empty()) return f;
      const auto most = Number<size_t>(properties, kShared);
      if (most != 0 && settings.shared > most)
        return "the kernel needs " + std::to_string(settings.shared) +
               " bytes of shared memory, the device has " + std::to_string(most) +
               " for a workgroup";
    }
    auto* entry = static_cast<Entry*>(kernel);
    const size_t index = static_cast<size_t>(device);
    std::lock_guard<std::mutex> lock(entry->image->mutex);
    if (entry->functions[index].load() != nullptr) return {};
    if (Failure f = Check(set_device_(device), "hipSetDevice"); !f.empty()) return f;
    Handle& module = entry->image->modules[index];
    if (module == nullptr) {
      Failure f = Check(module_load_(&module, entry->image->bytes.data()), "hipModuleLoadData");
      if (!f.empty()) {
        module = nullptr;
        return f;
      }
    }
    Handle function = nullptr;
    Failure f =
        Check(module_function_(&function, module, entry->symbol.c_str()), "hipModuleGetFunction");
    if (f.empty()) entry->functions[index].store(function);
    return f;
  }

  int ParamSize(Handle kernel, size_t index) const override {
    const auto& list = static_cast<Entry*>(kernel)->parameters.list;
    return index < list.size() ? static_cast<int>(list[index].size) : 0;
  }

  bool IsCapturing(Handle stream) const override {
    int status = 0;
    return stream != nullptr && is_capturing_(stream, &status) == 0 && status != 0;
  }

  Failure CannotEncode() const override { return "HIP has no tensor maps"; }
  Failure Encode(const TensorMap&, void*) const override { return CannotEncode(); }

  Failure CannotClear() const override {
    return clear_ == nullptr ? Missing("hipMemsetAsync") : Failure();
  }

  Failure Clear(void* address, size_t bytes, Handle stream) const override {
    return Check(clear_(address, 0, bytes, stream), "hipMemsetAsync");
  }

  // Packs the argument block itself, as the code object's metadata lays it out.
  Failure Launch(Handle kernel, int device, const Grid& grid, const Settings& settings,
                 Handle stream, void** params) const override {
    for (size_t i = 0; i < grid.blocks.size(); ++i) {
      const uint64_t threads = uint64_t{grid.blocks[i]} * grid.threads[i];
      if (threads >> 32 != 0)
        return "grid axis " + std::to_string(i) + " would need " + std::to_string(threads) +
               " threads, HIP launches fewer than 2^32";
    }
    auto* entry = static_cast<Entry*>(kernel);
    alignas(16) std::array<char, kMaxArguments> block{};
    size_t size = entry->parameters.bytes;
    for (const KernelParameter& p : entry->parameters.list)
      std::memcpy(&block[p.offset], *params++, p.size);
    void* const kPointer = reinterpret_cast<void*>(1);  // HIP_LAUNCH_PARAM_BUFFER_POINTER
    void* const kSize = reinterpret_cast<void*>(2);     // HIP_LAUNCH_PARAM_BUFFER_SIZE
    void* const kEnd = reinterpret_cast<void*>(3);      // HIP_LAUNCH_PARAM_END
    void* extra[] = {kPointer, block.data(), kSize, &size, kEnd};
    return Check(launch_(entry->functions[static_cast<size_t>(device)].load(), grid.blocks[0],
                         grid.blocks[1], grid.blocks[2], grid.threads[0], grid.threads[1],
                         grid.threads[2], settings.shared, stream, nullptr, extra),
                 "hipModuleLaunchKernel");
  }

 private:
  using Result = int;  // hipError_t
  static constexpr size_t kMaxArguments = 512;
  using Properties = std::array<char, 2 * 1472>;  // twice its size: it has grown before

  struct Image;
  struct Entry {
    Image* image = nullptr;
    std::string symbol;
    KernelParameters parameters;
    std::array<std::atomic<Handle>, kMaxDevices> functions{};
  };
  struct Image {
    std::string_view bytes;
    std::map<std::string, Entry, std::less<>> entries;
    std::mutex mutex;
    std::array<Handle, kMaxDevices> modules{};
  };

  Failure Read(int device, Properties* properties) const {
    return Check(properties_(properties->data(), device), "hipGetDeviceProperties");
  }

  template <typename T>
  static T Number(const Properties& properties, size_t at) {
    T value;
    std::memcpy(&value, &properties[at], sizeof value);
    return value;
  }

  Failure Check(Result result, const char* call) const {
    if (result == 0) return {};
    return std::string(call) + ": " + error_name_(result) + " (" + error_string_(result) + ")";
  }

  Result (*init_)(unsigned) = nullptr;
  const char* (*error_name_)(Result) = nullptr;
  const char* (*error_string_)(Result) = nullptr;
  Result (*properties_)(void*, int) = nullptr;
  Result (*set_device_)(int) = nullptr;
  Result (*module_load_)(Handle*, const void*) = nullptr;
  Result (*module_function_)(Handle*, Handle, const char*) = nullptr;
  Result (*clear_)(void*, int, size_t, Handle) = nullptr;
  Result (*is_capturing_)(Handle, int*) = nullptr;
  Result (*launch_)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                    Handle, void**, void**) = nullptr;
};

}  // namespace jax_mx
