// The few driver calls that a launch needs, taken at run time from the vendor's own library.
//
// Nothing is linked: a machine without the library imports jax_mx and gets an error only when a
// kernel is to run. A vendor is a class with these methods; launch.cc knows no vendor.
#pragma once

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <string>
#include <type_traits>

namespace jax_mx {

using Handle = void*;

// What went wrong, in the driver's words; empty when nothing did.
using Failure = std::string;

struct Grid {
  std::array<unsigned, 3> blocks;
  std::array<unsigned, 3> threads;
};

class CudaDriver {
 public:
  explicit CudaDriver(const char* library_name) {
    Handle library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      unusable_ = dlerror();
      return;
    }
    auto load = [&](auto& function, const char* symbol, bool required = true) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
      if (function == nullptr && required)
        unusable_ = std::string(library_name) + " has no " + symbol + "; update the GPU driver";
    };
    load(init_, "cuInit");
    load(error_name_, "cuGetErrorName");
    load(error_string_, "cuGetErrorString");
    load(device_get_, "cuDeviceGet");
    load(device_attribute_, "cuDeviceGetAttribute");
    load(library_load_, "cuLibraryLoadData");
    load(library_kernel_, "cuLibraryGetKernel");
    load(kernel_function_, "cuKernelGetFunction");
    load(kernel_param_, "cuKernelGetParamInfo", /*required=*/false);  // CUDA 12.4
    load(is_capturing_, "cuStreamIsCapturing");
    load(launch_, "cuLaunchKernel");
    if (unusable_.empty()) unusable_ = Check(init_(0), "cuInit");
  }

  // Why no call can be made; empty when calls can.
  const Failure& unusable() const { return unusable_; }

  // "sm_90" for compute capability 9.0.
  Failure Arch(int ordinal, std::string* arch) const {
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

  // The driver is not told the image's size: the caller has checked that the image is whole. The
  // bytes must stay; the library serves every device of the process.
  Failure Load(const void* image, Handle* library) const {
    return Check(library_load_(library, image, nullptr, nullptr, 0, nullptr, nullptr, 0),
                 "cuLibraryLoadData");
  }

  Failure Kernel(Handle library, const char* symbol, Handle* kernel) const {
    return Check(library_kernel_(kernel, library, symbol), "cuLibraryGetKernel");
  }

  // Loads the code into the current context now. The first launch would do so, which must not
  // happen while a stream is being captured.
  Failure Prepare(Handle kernel) const {
    Handle function = nullptr;
    return Check(kernel_function_(&function, kernel), "cuKernelGetFunction");
  }

  // The size of the kernel's parameter `index`; 0: there is none, -1: the driver cannot say.
  int ParamSize(Handle kernel, size_t index) const {
    if (kernel_param_ == nullptr) return -1;
    size_t offset = 0, size = 0;
    return kernel_param_(kernel, index, &offset, &size) == 0 ? static_cast<int>(size) : 0;
  }

  bool IsCapturing(Handle stream) const {
    int status = 0;
    return stream != nullptr && is_capturing_(stream, &status) == 0 && status != 0;
  }

  Failure Launch(Handle kernel, const Grid& grid, Handle stream, void** params) const {
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

  Failure unusable_;
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

}  // namespace jax_mx
