// A stand-in for libcuda.so that writes down what it is asked to launch, and fills results with a
// pattern that names the entry. It executes no kernel.
//
// JAX_MX_FAKE_ARCH      the compute capability it reports, e.g. 90
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
// For the test: entry, grid, block, scalars of the last launch, then the counts.
void fake_driver_report(int64_t* out) {
  std::memcpy(out, &last, sizeof(last));
  out[10] = launches;
  out[11] = libraries;
}
}
