// Rules followed for addresses that XLA's CPU client never passes (test_handler.py).
#include <cstdio>

#include "rule.h"

int main() {
  using namespace jax_mx;
  Kernel kernel;
  Entry& entry = kernel.entries.emplace_back();
  entry.symbol = "copy";
  entry.align = {1};
  entry.threads = {32, 1, 1};
  entry.parameters = {{Parameter::kMap, 0, 128}};
  Map& map = kernel.maps.emplace_back();
  map.buffer = 0;
  map.like.rank = 1;
  map.like.box = {16};
  map.dims[0] = {{kConstant, 16, 0}, 1, 1};
  const std::vector<int64_t> merge;
  alignas(64) static char memory[128];
  for (int offset : {0, 16, 1, 8, 15, -1}) {
    Buffers buffers;
    buffers.merge = &merge;
    buffers.size = 1;
    buffers.data[0] = offset < 0 ? nullptr : memory + offset;
    buffers.bytes[0] = 16;
    Arguments arguments;
    ffi::Error error = Follow(kernel, 0, buffers, &arguments);
    std::printf("%d %s\n", offset, error.failure() ? error.message().c_str() : "followed");
  }
}
