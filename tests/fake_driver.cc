// A stand-in for libcuda.so and libamdhip64.so that writes down what it is asked to launch. It
// executes no kernel.
//
// JAX_MX_FAKE_ARCH      the compute capability it reports, e.g. 90, or the arch, e.g. gfx942
// JAX_MX_FAKE_FAIL      a call that fails, e.g. cuLaunchKernel; "bounds": cuInit reads beyond the end
// JAX_MX_FAKE_UNITS     the number of multiprocessors it reports, 132 by default
//
// A CUDA kernel's parameters are what fake_parameters says; the driver knows no others.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {
struct Kernel {
  std::string symbol;
  int unusual = 0;
  std::map<int, int> allowed{};  // bytes of shared memory, per device
  int Allowed() const {  // launches do not say on which device they are
    int most = 0;
    for (auto [device, bytes] : allowed) most = bytes > most ? bytes : most;
    return most;
  }
};
std::mutex mutex;
std::vector<size_t> parameters;
std::string last = "{}", events;  // JSON: the last launch, and what was done in which order
int launches = 0, libraries = 0, static_shared = 0;

bool Fails(const char* call) {
  const char* name = std::getenv("JAX_MX_FAKE_FAIL");
  return name != nullptr && std::strcmp(name, call) == 0;
}
std::string Hex(const void* data, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; ++i)
    for (int shift : {4, 0})
      text += "0123456789abcdef"[static_cast<const unsigned char*>(data)[i] >> shift & 15];
  return text;
}
std::string List(std::vector<unsigned long long> numbers) {
  std::string text;
  for (auto n : numbers) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}
void Event(const std::string& what, std::vector<unsigned long long> numbers) {
  events += (events.empty() ? "[\"" : ", [\"") + what + "\", " + List(numbers) + "]";
}
int Units() {
  const char* units = std::getenv("JAX_MX_FAKE_UNITS");
  return units ? std::atoi(units) : 132;
}
void Record(void* kernel, const char* call, const unsigned* numbers, const std::string& attributes,
            void** params) {
  const std::string& symbol = static_cast<Kernel*>(kernel)->symbol;
  std::string values;
  for (size_t i = 0; i < parameters.size(); ++i)
    values += (i ? ", \"" : "\"") + Hex(params[i], parameters[i]) + "\"";
  last = "{\"call\": \"" + std::string(call) + "\", \"symbol\": \"" + symbol +
         "\", \"entry\": " + std::to_string(symbol.back() - '0') +
         ", \"grid\": " + List({numbers[0], numbers[1], numbers[2]}) +
         ", \"threads\": " + List({numbers[3], numbers[4], numbers[5]}) +
         ", \"shared\": " + std::to_string(numbers[6]) + ", \"attributes\": {" + attributes +
         "}, \"parameters\": [" + values + "]}";
  Event("launch", {});
  ++launches;
}
}  // namespace

extern "C" {
// For the test: the sizes of a kernel's parameters from now on, and its own shared memory.
void fake_parameters(const int64_t* sizes, int64_t count, int64_t shared) {
  parameters.assign(sizes, sizes + count);
  static_shared = static_cast<int>(shared);
}
// For the test: all that was written down since the last report, as JSON.
const char* fake_report() {
  static std::string text;
  std::lock_guard<std::mutex> lock(mutex);
  text = "{\"launches\": " + std::to_string(launches) + ", \"libraries\": " +
         std::to_string(libraries) + ", \"events\": [" + events + "], \"last\": " + last + "}";
  events.clear();
  return text.c_str();
}

// ---- CUDA ---
int cuInit(unsigned) {
  if (Fails("bounds")) return *(new std::vector<int>(3))->end();
  return Fails("cuInit") ? 100 : 0;
}
int cuGetErrorName(int, const char** text) { *text = "FAKE_ERROR"; return 0; }
int cuGetErrorString(int, const char** text) { *text = "as asked for"; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const char* arch = std::getenv("JAX_MX_FAKE_ARCH");
  const int capability = arch ? std::atoi(arch) : 90;
  const std::map<int, int> known = {{16, Units()}, {75, capability / 10}, {76, capability % 10},
                                    {97, 232448}, {120, capability >= 90}};
  auto it = known.find(attribute);
  if (it == known.end() || (attribute == 16 && Fails("cuDeviceGetAttribute"))) return 1;
  *value = it->second;
  return 0;
}
int cuLibraryLoadData(void** library, const void* image, void*, void*, unsigned, void*, void*,
                      unsigned) {
  if (Fails("cuLibraryLoadData") || std::memcmp(image, "\177ELF", 4) != 0) return 200;
  std::lock_guard<std::mutex> lock(mutex);
  ++libraries;
  *library = const_cast<void*>(image);
  return 0;
}
// As libcuda does: one handle per library and symbol.
int cuLibraryGetKernel(void** kernel, void* library, const char* symbol) {
  static std::map<std::pair<void*, std::string>, Kernel*> kernels;
  if (Fails("cuLibraryGetKernel")) return 500;
  std::lock_guard<std::mutex> lock(mutex);
  Kernel*& found = kernels[{library, symbol}];
  if (found == nullptr) found = new Kernel{symbol};
  *kernel = found;
  return 0;
}
int cuKernelGetFunction(void** function, void* kernel) {
  if (Fails("cuKernelGetFunction")) return 500;
  *function = kernel;
  return 0;
}
int cuKernelGetParamInfo(void*, size_t index, size_t* offset, size_t* size) {
  if (index >= parameters.size()) return 1;
  *offset = 0;
  *size = parameters[index];
  return 0;
}
int cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  if (Fails("cuKernelGetAttribute")) return 1;
  *value = attribute == 1 ? static_shared : static_cast<Kernel*>(kernel)->allowed[device];
  return attribute == 1 || attribute == 8 ? 0 : 1;
}
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  if (Fails("cuKernelSetAttribute") || (attribute != 8 && attribute != 14)) return 1;
  std::lock_guard<std::mutex> lock(mutex);
  auto* it = static_cast<Kernel*>(kernel);
  (attribute == 8 ? it->allowed[device] : it->unusual) = value;
  Event("set", {static_cast<unsigned long long>(attribute), static_cast<unsigned long long>(value),
                static_cast<unsigned long long>(device)});
  return 0;
}
// A map here: its numbers as bytes, the address, five dims, four strides, five boxes.
int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int promotion, int fill) {
  if (Fails("cuTensorMapEncodeTiled") || reinterpret_cast<uintptr_t>(map) % 64 != 0) return 1;
  struct { uint8_t head[8]; uint64_t address, dims[5], strides[4]; uint16_t box[5]; } out{};
  static_assert(sizeof(out) <= 128);
  const int head[] = {type, static_cast<int>(rank), interleave, swizzle, promotion, fill};
  for (int i = 0; i < 6; ++i) out.head[i] = static_cast<uint8_t>(head[i]);
  out.address = reinterpret_cast<uintptr_t>(address);
  for (uint32_t i = 0; i < rank; ++i) {
    if (steps[i] != 1) return 1;
    out.dims[i] = dims[i];
    out.box[i] = static_cast<uint16_t>(box[i]);
    if (i + 1 < rank) out.strides[i] = strides[i];
  }
  std::memset(map, 0, 128);
  std::memcpy(map, &out, sizeof(out));
  return 0;
}
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void*) {
  if (Fails("cuMemsetD8Async")) return 1;
  std::lock_guard<std::mutex> lock(mutex);
  std::memset(reinterpret_cast<void*>(address), value, bytes);
  Event("clear", {address, value, bytes});
  return 0;
}
int cuStreamIsCapturing(void*, int* status) { *status = 0; return 0; }
int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void*, void** params, void**) {
  if (Fails("cuLaunchKernel")) return 1;
  std::lock_guard<std::mutex> lock(mutex);
  if (static_cast<int>(shared) > static_cast<Kernel*>(kernel)->Allowed()) return 1;
  const unsigned numbers[] = {gx, gy, gz, bx, by, bz, shared};
  Record(kernel, "cuLaunchKernel", numbers, "", params);
  return 0;
}
// cuda.h's CUlaunchAttribute and CUlaunchConfig.
struct Attribute { int id; char pad[4]; union { char bytes[64]; unsigned numbers[16]; } value; };
struct Config { unsigned numbers[7]; void* stream; Attribute* attributes; unsigned count; };
int cuLaunchKernelEx(const Config* config, void* kernel, void** params, void**) {
  if (Fails("cuLaunchKernelEx")) return 1;
  std::lock_guard<std::mutex> lock(mutex);
  auto* it = static_cast<Kernel*>(kernel);
  if (static_cast<int>(config->numbers[6]) > it->Allowed()) return 1;
  std::string text;
  for (unsigned i = 0; i < config->count; ++i) {
    const auto& [id, pad, value] = config->attributes[i];
    if (id == 4 && value.numbers[0] * value.numbers[1] * value.numbers[2] > 8 && !it->unusual)
      return 1;
    text += (i ? ", \"" : "\"") + std::to_string(id) + "\": " +
            List({value.numbers[0], value.numbers[1], value.numbers[2]});
  }
  Record(kernel, "cuLaunchKernelEx", config->numbers, text, params);
  return 0;
}

// ---- HIP ---
int hipInit(unsigned) { return Fails("hipInit") ? 100 : 0; }
const char* hipGetErrorName(int) { return "hipFakeError"; }
const char* hipGetErrorString(int) { return "as asked for"; }
int hipGetDevicePropertiesR0600(void* properties, int) {
  const char* arch = std::getenv("JAX_MX_FAKE_ARCH");
  auto* at = static_cast<char*>(properties);
  std::strcpy(at + 1160, arch ? arch : "gfx942:sramecc+:xnack-");
  const size_t shared = 65536;
  const int units = Units();
  std::memcpy(at + 296, &shared, sizeof(shared));
  std::memcpy(at + 388, &units, sizeof(units));
  return 0;
}
int hipSetDevice(int device) { return device; }
int hipModuleLoadData(void** module, const void* image) {
  if (Fails("hipModuleLoadData")) return 200;
  std::lock_guard<std::mutex> lock(mutex);
  ++libraries;
  Event("load", {static_cast<const unsigned char*>(image)[48]});  // the chip that it is for
  *module = const_cast<void*>(image);
  return 0;
}
int hipModuleGetFunction(void** function, void*, const char* symbol) {
  if (Fails("hipModuleGetFunction")) return 500;
  *function = new Kernel{symbol};
  return 0;
}
int hipMemsetAsync(void* address, int value, size_t bytes, void*) {
  if (Fails("hipMemsetAsync")) return 1;
  std::memset(address, value, bytes);
  Event("clear", {reinterpret_cast<uintptr_t>(address), static_cast<unsigned>(value), bytes});
  return 0;
}
int hipStreamIsCapturing(void*, int* status) { *status = 0; return 0; }
int hipModuleLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                          unsigned by, unsigned bz, unsigned shared, void*, void** params,
                          void** extra) {
  if (Fails("hipModuleLaunchKernel") || params != nullptr) return 1;
  std::lock_guard<std::mutex> lock(mutex);
  const unsigned numbers[] = {gx, gy, gz, bx, by, bz, shared};
  parameters = {*static_cast<size_t*>(extra[3])};  // the argument block
  Record(kernel, "hipModuleLaunchKernel", numbers, "", &extra[1]);
  return 0;
}
}
