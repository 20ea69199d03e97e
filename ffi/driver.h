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

// Where a driver's functions come from.
struct Library {
  using Functions = std::map<std::string, uintptr_t>;  // addresses by name

  std::string name;
  std::function<void*(const char* symbol)> find;
  Failure failure;

  static Library None(Failure why) { return {"", nullptr, std::move(why)}; }

  // Of several versions the one that the process has, whose streams XLA passes; else the first that
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

  // As kernels name it: "sm_90" for compute capability 9.0, "gfx950".
  virtual Failure Arch(int device, std::string* arch) const = 0;

  // One library serves every device of the process. The image is whole, and stays.
  virtual Failure Load(std::string_view image, Handle* library) const = 0;
  virtual Failure Kernel(Handle library, const char* symbol, Handle* kernel) const = 0;

  // Brings the code to the device, whose context is current. The first launch would do so, which
  // must not happen while a stream is being captured.
  virtual Failure Prepare(Handle kernel, int device) const = 0;

  // The size of the kernel's parameter `index`; 0: there is none, -1: the driver cannot say.
  virtual int ParamSize(Handle kernel, size_t index) const = 0;

  virtual bool IsCapturing(Handle stream) const = 0;

  // `kernel` has been prepared for `device`; `params` point at its parameters' values.
  virtual Failure Launch(Handle kernel, int device, const Grid& grid, Handle stream,
                         void** params) const = 0;

 protected:
  // Looks a function up; one that is missing makes the driver unusable if it is required.
  template <typename Function>
  void Find(const Library& library, Function& function, const char* symbol, bool required = true) {
    if (!library.failure.empty()) {
      unusable_ = library.failure;
      return;
    }
    function = reinterpret_cast<Function>(library.find(symbol));
    if (function == nullptr && required)
      unusable_ = library.name + " has no " + symbol + "; update the GPU driver";
  }

  Failure unusable_;
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
    Find(library, is_capturing_, "cuStreamIsCapturing");
    Find(library, launch_, "cuLaunchKernel");
    if (unusable_.empty()) unusable_ = Check(init_(0), "cuInit");
  }

  Failure Arch(int ordinal, std::string* arch) const override {
    constexpr int kMajor = 75, kMinor = 76;  // CUdevice_attribute
    int device = 0, major = 0, minor = 0;
    if (Failure f = Check(device_get_(&device, ordinal), "cuDeviceGet"); !f.empty()) return f;
    if (Failure f = Check(device_attribute_(&major, kMajor, device), "cuDeviceGetAttribute");
        !f.empty())
      return f;
    if (Failure f = Check(device_attribute_(&minor, kMinor, device), "cuDeviceGetAttribute");
        !f.empty())
      return f;
    *arch = "sm_" + std::to_string(10 * major + minor);
    return {};
  }

  // The driver is not told the image's size.
  Failure Load(std::string_view image, Handle* library) const override {
    return Check(library_load_(library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                 "cuLibraryLoadData");
  }

  Failure Kernel(Handle library, const char* symbol, Handle* kernel) const override {
    return Check(library_kernel_(kernel, library, symbol), "cuLibraryGetKernel");
  }

  Failure Prepare(Handle kernel, int) const override {
    Handle function = nullptr;
    return Check(kernel_function_(&function, kernel), "cuKernelGetFunction");
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

  Failure Launch(Handle kernel, int, const Grid& grid, Handle stream,
                 void** params) const override {
    return Check(launch_(kernel, grid.blocks[0], grid.blocks[1], grid.blocks[2], grid.threads[0],
                         grid.threads[1], grid.threads[2], 0, stream, params, nullptr),
                 "cuLaunchKernel");
  }

 private:
  using Result = int;  // CUresult

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
  Result (*is_capturing_)(Handle, int*) = nullptr;
  Result (*launch_)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                    Handle, void**, void**) = nullptr;
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
    Find(library, is_capturing_, "hipStreamIsCapturing");
    Find(library, launch_, "hipModuleLaunchKernel");
    if (unusable_.empty()) unusable_ = Check(init_(0), "hipInit");
  }

  Failure Arch(int device, std::string* arch) const override {
    constexpr size_t kSize = 1472, kName = 1160, kNameSize = 256;  // gcnArchName
    alignas(8) std::array<char, 2 * kSize> properties{};  // twice: it has grown before
    if (Failure f = Check(properties_(properties.data(), device), "hipGetDeviceProperties");
        !f.empty())
      return f;
    const std::string_view name(&properties[kName], strnlen(&properties[kName], kNameSize));
    *arch = name.substr(0, name.find(':'));  // "gfx942:sramecc+:xnack-"
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

  Failure Prepare(Handle kernel, int device) const override {
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

  // Packs the argument block itself, as the code object's metadata lays it out.
  Failure Launch(Handle kernel, int device, const Grid& grid, Handle stream,
                 void** params) const override {
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
                         grid.threads[2], 0, stream, nullptr, extra),
                 "hipModuleLaunchKernel");
  }

 private:
  using Result = int;  // hipError_t
  static constexpr size_t kMaxArguments = 512;

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
  Result (*is_capturing_)(Handle, int*) = nullptr;
  Result (*launch_)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                    Handle, void**, void**) = nullptr;
};

}  // namespace jax_mx
