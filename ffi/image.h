// Is an image what the caller meant, and whole? Asked before any driver sees it: drivers take an
// image without its size and read past the end of a truncated one.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace jax_mx {

// Every header, section and segment of a 64-bit little-endian ELF file lies inside `bytes`.
inline bool IsWholeElf(std::string_view bytes) {
  auto read = [&](uint64_t at, size_t width) {
    uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at, width);
    return value;
  };
  auto inside = [&](uint64_t at, uint64_t size) {
    return at <= bytes.size() && size <= bytes.size() - at;
  };
  constexpr uint64_t kHeader = 64, kSection = 64, kSegment = 56;
  if (bytes.size() < kHeader || bytes.substr(0, 6) != "\x7f" "ELF\x02\x01") return false;
  const uint64_t segments = read(0x20, 8), sections = read(0x28, 8);
  const uint64_t segment_size = read(0x36, 2), segment_count = read(0x38, 2);
  const uint64_t section_size = read(0x3a, 2), section_count = read(0x3c, 2);
  if (section_size < kSection || section_count == 0 ||
      !inside(sections, section_size * section_count))
    return false;
  if (segment_count != 0 &&
      (segment_size < kSegment || !inside(segments, segment_size * segment_count)))
    return false;
  constexpr uint64_t kNoBits = 8;  // SHT_NOBITS: takes no place in the file
  for (uint64_t i = 0; i < section_count; ++i) {
    const uint64_t at = sections + i * section_size;
    if (read(at + 4, 4) != kNoBits && !inside(read(at + 24, 8), read(at + 32, 8))) return false;
  }
  for (uint64_t i = 0; i < segment_count; ++i) {
    const uint64_t at = segments + i * segment_size;
    if (!inside(read(at + 8, 8), read(at + 32, 8))) return false;
  }
  return true;
}

// FIPS 180-4, as lower-case hexadecimal.
inline std::string Sha256(std::string_view bytes) {
  // The first 32 bits of the fractional parts of the square roots of the first 8 primes and of the
  // cube roots of the first 64 primes (FIPS 180-4, 5.3.3 and 4.2.2).
  std::array<uint32_t, 8> hash = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  static constexpr std::array<uint32_t, 64> kRound = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
      0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
      0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
      0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
      0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
      0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
      0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
      0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
      0xc67178f2};
  auto rotate = [](uint32_t x, int n) { return x >> n | x << (32 - n); };

  std::vector<uint8_t> message(bytes.begin(), bytes.end());
  message.push_back(0x80);
  while (message.size() % 64 != 56) message.push_back(0);
  for (int shift = 56; shift >= 0; shift -= 8)
    message.push_back(static_cast<uint8_t>(uint64_t{8} * bytes.size() >> shift));

  for (size_t at = 0; at < message.size(); at += 64) {
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 16; ++i)
      for (size_t j = 0; j < 4; ++j) w[i] = w[i] << 8 | message[at + 4 * i + j];
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] +
             (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    std::array<uint32_t, 8> v = hash;  // a b c d e f g h
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t t1 = v[7] + (rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25)) +
                          ((v[4] & v[5]) ^ (~v[4] & v[6])) + kRound[i] + w[i];
      const uint32_t t2 = (rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22)) +
                          ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      v = {t1 + t2, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
    }
    for (size_t i = 0; i < 8; ++i) hash[i] += v[i];
  }
  std::string hex;
  for (uint32_t word : hash)
    for (int shift = 28; shift >= 0; shift -= 4) hex += "0123456789abcdef"[word >> shift & 15];
  return hex;
}

}  // namespace jax_mx
