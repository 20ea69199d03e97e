// A stand-in for libcuda.so and libamdhip64.so that writes down what it is asked to launch, and (as
// CUDA) fills results with a pattern that names the entry. It executes no kernel.
//
// JAX_MX_FAKE_ARCH      the compute capability it reports, e.g. 90, or the arch, e.g. gfx942
// JAX_MX_FAKE_FAIL      a call that fails, e.g. cuLaunchKernel
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {
struct Kernel { std::string symbol; };
struct Launch { int64_t entry, grid[3], block[3], scalars[3]; };
Launch last{};
int launches = 0, libraries = 0;
struct { int64_t mach, entry, grid, block, bytes; char arguments[88]; } hip{};
bool Fails(const char* call) {
  const char* name = std::getenv("JAX_MX_FAKE_FAIL");
  return name != nullptr && std::strcmp(name, call) == 0;
}
}  // namespace

extern "C" {
int cuInit(unsigned) { return Fails("cuInit") ? 100 : 0; }
int cuGetErrorName(int, const char** text) { *text = "FAKE_ERROR"; return 0; }
int cuGetErrorString(int, const char** text) { *text = "as asked for"; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const char* arch = std::getenv("JAX_MX_FAKE_ARCH");
  const int capability = arch ? std::atoi(arch) : 90;
  *value = attribute == 75 ? capability / 10 : capability % 10;
  return 0;
}
int cuLibraryLoadData(void** library, const void* image, void*, void*, unsigned, void*, void*,
                      unsigned) {
  if (Fails("cuLibraryLoadData") || std::memcmp(image, "\177ELF", 4) != 0) return 200;
  ++libraries;
  *library = const_cast<void*>(image);
  return 0;
}
int cuLibraryGetKernel(void** kernel, void*, const char* symbol) {
  if (Fails("cuLibraryGetKernel")) return 500;
  *kernel = new Kernel{symbol};
  return 0;
}
int cuKernelGetFunction(void** function, void* kernel) { *function = kernel; return 0; }
// As quantize's kernel for the last axis: three pointers, two int64, four int32.
int cuKernelGetParamInfo(void*, size_t index, size_t* offset, size_t* size) {
  *offset = 0;
  *size = index < 5 ? 8 : 4;
  return index < 9 ? 0 : 1;
}
int cuStreamIsCapturing(void*, int* status) { *status = 0; return 0; }
int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned, void*, void** params, void**) {
  if (Fails("cuLaunchKernel")) return 1;
  const int64_t n = *static_cast<int64_t*>(params[3]);
  const int entry = static_cast<Kernel*>(kernel)->symbol.back() - '0';
  last = {entry, {gx, gy, gz}, {bx, by, bz},
          {n, *static_cast<int32_t*>(params[7]), *static_cast<int32_t*>(params[8])}};
  ++launches;
  std::memset(*static_cast<void**>(params[1]), 0x40 + entry, static_cast<size_t>(n));
  std::memset(*static_cast<void**>(params[2]), 0x70 + entry, static_cast<size_t>(n / 32));
  return 0;
}

// ---- HIP ---
int hipInit(unsigned) { return Fails("hipInit") ? 100 : 0; }
const char* hipGetErrorName(int) { return "hipFakeError"; }
const char* hipGetErrorString(int) { return "as asked for"; }
int hipGetDevicePropertiesR0600(void* properties, int) {
  const char* arch = std::getenv("JAX_MX_FAKE_ARCH");
  std::strcpy(static_cast<char*>(properties) + 1160, arch ? arch : "gfx942:sramecc+:xnack-");
  return 0;
}
int hipSetDevice(int device) { return device; }
int hipModuleLoadData(void** module, const void* image) {
  if (Fails("hipModuleLoadData")) return 200;
  ++libraries;
  std::memcpy(&hip.mach, static_cast<const char*>(image) + 48, 1);
  *module = const_cast<void*>(image);
  return 0;
}
int hipModuleGetFunction(void** function, void*, const char* symbol) {
  if (Fails("hipModuleGetFunction")) return 500;
  *function = new Kernel{symbol};
  return 0;
}
int hipStreamIsCapturing(void*, int* status) { *status = 0; return 0; }
int hipModuleLaunchKernel(void* kernel, unsigned gx, unsigned, unsigned, unsigned bx, unsigned,
                          unsigned, unsigned, void*, void** params, void** extra) {
  if (Fails("hipModuleLaunchKernel")) return 1;
  ++launches;
  hip.entry = static_cast<Kernel*>(kernel)->symbol.back() - '0';
  hip.grid = gx;
  hip.block = bx;
  hip.bytes = static_cast<int64_t>(*static_cast<size_t*>(extra[3]));
  if (params == nullptr && hip.bytes <= static_cast<int64_t>(sizeof(hip.arguments)))
    std::memcpy(hip.arguments, extra[1], static_cast<size_t>(hip.bytes));
  return 0;
}
// For the test: mach, entry, grid, block, bytes, and the argument block.
void fake_hip_report(void* out) { std::memcpy(out, &hip, sizeof(hip)); }

// For the test: entry, grid, block, scalars of the last launch, then the counts.
void fake_driver_report(int64_t* out) {
  std::memcpy(out, &last, sizeof(last));
  out[10] = launches;
  out[11] = libraries;
}
}
