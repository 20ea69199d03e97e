// A stand-in for XLA's runtime: calls a handler with attributes and buffers that a test made up, as
// often as it likes, without a program, a device or jaxlib. XLA's header says what the frames are.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace {
struct Context {  // XLA's own is opaque, and its name is not the same in every version
  void* state = nullptr;
  int64_t type = 0;
};
template <typename Args>
Context* ContextOf(Args* args) {
  return reinterpret_cast<Context*>(args->ctx);
}
XLA_FFI_TypeInfo type_info;  // of the handler's state, the only type that is registered

template <typename Args>
XLA_FFI_Error* Unexpected(Args*) {
  std::fputs("the handler asks for what it never asked for\n", stderr);
  std::abort();
}

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message};
}
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* RegisterType(XLA_FFI_Type_Register_Args* args) {
  if (args->type_id->type_id == 0) args->type_id->type_id = 1;
  type_info = *args->type_info;
  return nullptr;
}
XLA_FFI_Error* SetState(XLA_FFI_State_Set_Args* args) {
  ContextOf(args)->state = args->state;
  ContextOf(args)->type = args->type_id->type_id;
  return nullptr;
}
XLA_FFI_Error* GetState(XLA_FFI_State_Get_Args* args) {
  if (ContextOf(args)->type != args->type_id->type_id) return new XLA_FFI_Error{"another type"};
  args->state = ContextOf(args)->state;
  return nullptr;
}

const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api* const api = [] {
    auto* api = new XLA_FFI_Api{};
    api->struct_size = XLA_FFI_Api_STRUCT_SIZE;
    api->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                        XLA_FFI_API_MINOR};
    api->XLA_FFI_Error_Create = CreateError;
    api->XLA_FFI_Error_Destroy = DestroyError;
    api->XLA_FFI_Type_Register = RegisterType;
    api->XLA_FFI_State_Set = SetState;
    api->XLA_FFI_State_Get = GetState;
    api->XLA_FFI_Stream_Get = Unexpected;
    api->XLA_FFI_DeviceMemory_Allocate = Unexpected;
    api->XLA_FFI_DeviceOrdinal_Get = Unexpected;
    return api;
  }();
  return api;
}

// Attributes, from a text of bytes. An exact allocation for each, so that a read beyond one shows.
class Attributes {
 public:
  Attributes(const char* at) : at_(at) {}

  XLA_FFI_Attrs Dictionary() {
    const auto count = Read<uint32_t>();
    XLA_FFI_Attrs out{XLA_FFI_Attrs_STRUCT_SIZE, nullptr, count, Array<XLA_FFI_AttrType>(count),
                      Array<XLA_FFI_ByteSpan*>(count), Array<void*>(count)};
    for (uint32_t i = 0; i < count; ++i) {
      out.names[i] = Keep(Span());
      const char kind = Read<char>();
      if (kind == 'D') {
        out.types[i] = XLA_FFI_AttrType_DICTIONARY;
        out.attrs[i] = Keep(Dictionary());
      } else if (kind == 'S') {
        out.types[i] = XLA_FFI_AttrType_STRING;
        out.attrs[i] = Keep(Span());
      } else if (kind == 'A' || kind == 'H') {  // of int64; of int32
        out.types[i] = XLA_FFI_AttrType_ARRAY;
        const auto type = kind == 'A' ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32;
        const auto size = Read<uint32_t>(), width = kind == 'A' ? 8u : 4u;
        out.attrs[i] = Keep(XLA_FFI_Array{type, size, Bytes(size * width)});
      } else {  // 'I', an int64; 'W', a float32
        out.types[i] = XLA_FFI_AttrType_SCALAR;
        const auto type = kind == 'I' ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_F32;
        out.attrs[i] = Keep(XLA_FFI_Scalar{type, Bytes(kind == 'I' ? 8 : 4)});
      }
    }
    return out;
  }

 private:
  template <typename T>
  T Read() {
    T value;
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  char* Bytes(size_t size) {
    char* found = Array<char>(size);
    std::memcpy(found, at_, size);
    at_ += size;
    return found;
  }
  XLA_FFI_ByteSpan Span() {
    const auto size = Read<uint32_t>();
    return {Bytes(size), size};
  }
  template <typename T>
  T* Array(size_t count) {
    auto kept = std::shared_ptr<void>(std::malloc(count * sizeof(T)), std::free);
    kept_.push_back(kept);
    return static_cast<T*>(kept.get());
  }
  template <typename T>
  T* Keep(T value) {
    T* found = Array<T>(1);
    *found = value;
    return found;
  }

  const char* at_;
  std::deque<std::shared_ptr<void>> kept_;
};

XLA_FFI_CallFrame Frame(XLA_FFI_ExecutionStage stage, Context* context) {
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = reinterpret_cast<decltype(frame.ctx)>(context);
  frame.stage = stage;
  frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  return frame;
}

// The error's text, or null.
const char* Text(XLA_FFI_Error* error) {
  static std::string text;
  if (error == nullptr) return nullptr;
  text = error->message;
  delete error;
  return text.c_str();
}
}  // namespace

extern "C" {
// Once, before any call: the handler registers its state's type when it is asked for metadata.
const char* handler_register(XLA_FFI_Handler* instantiate) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata,
                              nullptr};
  extension.metadata = &metadata;
  auto frame = Frame(XLA_FFI_ExecutionStage_INSTANTIATE, nullptr);
  frame.extension_start = &extension.extension_base;
  return Text(instantiate(&frame));
}

// Builds an executable, as it were: an error, or null and what handler_run takes.
const char* handler_build(XLA_FFI_Handler* instantiate, const char* attributes,
                          Context** context) {
  Attributes own(attributes);
  *context = new Context;
  auto frame = Frame(XLA_FFI_ExecutionStage_INSTANTIATE, *context);
  frame.attrs = own.Dictionary();
  return Text(instantiate(&frame));
}

// Runs it on buffers: per buffer its type, rank and address; the dimensions of all in a row.
const char* handler_run(XLA_FFI_Handler* execute, Context* context,
                        int64_t operands, int64_t results, const int64_t* types,
                        const int64_t* ranks, const int64_t* dims, void* const* addresses) {
  std::deque<std::vector<int64_t>> kept;
  std::vector<XLA_FFI_Buffer> buffers;
  for (int64_t i = 0; i < operands + results; ++i) {
    kept.emplace_back(dims, dims + ranks[i]);
    dims += ranks[i];
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr,
                       static_cast<XLA_FFI_DataType>(types[i]), addresses[i], ranks[i],
                       kept.back().data()});
  }
  std::vector<void*> at;
  for (XLA_FFI_Buffer& buffer : buffers) at.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> args(static_cast<size_t>(operands), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> rets(static_cast<size_t>(results), XLA_FFI_RetType_BUFFER);
  auto frame = Frame(XLA_FFI_ExecutionStage_EXECUTE, context);
  frame.args.size = operands;
  frame.args.types = args.data();
  frame.args.args = at.data();
  frame.rets.size = results;
  frame.rets.types = rets.data();
  frame.rets.rets = at.data() + operands;
  return Text(execute(&frame));
}

void handler_free(Context* context) {
  if (context->state != nullptr) type_info.deleter(context->state);
  delete context;
}
}
