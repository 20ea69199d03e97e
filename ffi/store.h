// The binaries of this process, by content: what calls carry, what Python hands over, and what the
// folders hold that Python registered.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "driver.h"
#include "image.h"

namespace jax_mx {

// A binary and, once loaded, its library: one for all calls and devices.
struct Image {
  std::string sha256, bytes;
  std::mutex mutex;
  Handle library = nullptr;
};

class Store {
 public:
  static Store& Get() {
    static auto* store = new Store();
    return *store;
  }

  // Where binaries are looked for from now on, in this order: a binary is the file
  // <folder>/<its sha256>. `advice` ends the error about a binary that is nowhere.
  void Use(std::vector<std::string> folders, std::string advice) {
    std::lock_guard<std::mutex> lock(mutex_);
    folders_ = std::move(folders);
    advice_ = std::move(advice);
  }

  // Takes a binary into the process, unless it is not what its sha256 says.
  Failure Intern(std::string_view sha256, std::string_view bytes, Image** image) {
    std::lock_guard<std::mutex> lock(mutex_);
    return Take(sha256, bytes, image);
  }

  // The binary, from the process or else from the folders; null where none of them has it.
  Image* Find(std::string_view sha256) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (auto it = images_.find(sha256); it != images_.end()) return it->second.get();
    if (!IsName(sha256)) return nullptr;
    for (const std::string& folder : folders_) {
      std::string bytes;
      Image* image = nullptr;
      if (Read(Path(folder, sha256), &bytes) == kRead && Take(sha256, bytes, &image).empty()) {
        ++read;
        return image;
      }
    }
    return nullptr;
  }

  // Where a binary that `Find` did not find was looked for, then the advice.
  std::string Searched(const std::vector<std::string>& hashes) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string folders, damaged;
    for (const std::string& folder : folders_) {
      folders += (folders.empty() ? "" : ", ") + folder;
      for (const std::string& sha256 : hashes) {
        std::string bytes;
        const std::string path = Path(folder, sha256);
        if (IsName(sha256) && Read(path, &bytes) != kMissing)
          damaged += (damaged.empty() ? "" : ", ") + path;
      }
    }
    std::string text = folders.empty() ? "no folder of binaries is registered"
                                       : "searched in " + folders;
    if (!damaged.empty()) text += "; damaged or not readable: " + damaged;
    return advice_.empty() ? text : text + "; " + advice_;
  }

  std::atomic<int64_t> read{0};  // binaries read from the folders

 private:
  enum Reading { kMissing, kUnreadable, kRead };

  static std::string Path(const std::string& folder, std::string_view sha256) {
    return folder + "/" + std::string(sha256);
  }

  // A file's name is made of it, so that it must be nothing but a hash.
  static bool IsName(std::string_view sha256) {
    return sha256.size() == 64 &&
           sha256.find_first_not_of("0123456789abcdef") == std::string_view::npos;
  }

  // Never waits, whatever has the file's name: a pipe, say.
  static Reading Read(const std::string& path, std::string* bytes) {
    constexpr off_t kMost = off_t{1} << 30;
    const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    struct stat found {};
    if (file < 0) return lstat(path.c_str(), &found) == 0 ? kUnreadable : kMissing;
    bool whole = fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_size <= kMost;
    if (whole) bytes->resize(static_cast<size_t>(found.st_size));
    for (size_t at = 0; whole && at < bytes->size();) {
      const ssize_t count = ::read(file, &(*bytes)[at], bytes->size() - at);
      if (count <= 0) whole = false;
      else at += static_cast<size_t>(count);
    }
    close(file);
    return whole ? kRead : kUnreadable;
  }

  Failure Take(std::string_view sha256, std::string_view bytes, Image** image) {
    auto it = images_.find(sha256);
    if (it != images_.end() && it->second->bytes == bytes) {
      *image = it->second.get();
      return {};
    }
    if (!IsWholeElf(bytes)) return "image is not a whole 64-bit ELF file (truncated or corrupted)";
    if (Sha256(bytes) != sha256)
      return "image does not have the sha256 " + std::string(sha256) +
             " that the call names (corrupted)";
    auto fresh = std::make_unique<Image>();
    fresh->sha256 = sha256;
    fresh->bytes = bytes;
    *image = images_.emplace(fresh->sha256, std::move(fresh)).first->second.get();
    return {};
  }

  std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Image>, std::less<>> images_;
  std::vector<std::string> folders_;
  std::string advice_;
};

}  // namespace jax_mx
