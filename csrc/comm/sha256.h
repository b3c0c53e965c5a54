// SHA-256 and HMAC over it, for frames of one kilobyte.
// Source: FIPS 180-4, sections 4.1.2, 5 and 6.2; RFC 2104.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace anychip {

class Sha256 {
 public:
  void add(const uint8_t* data, size_t nbytes) {
    total_ += nbytes;
    while (nbytes--) {
      block_[used_++] = *data++;
      if (used_ == 64) {
        mix();
      }
    }
  }

  void finish(uint8_t digest[32]) {
    const uint64_t bits = total_ * 8;
    const uint8_t one = 0x80, zero = 0;
    add(&one, 1);
    while (used_ != 56) {
      add(&zero, 1);
    }
    for (int i = 7; i >= 0; --i) {
      const uint8_t byte = static_cast<uint8_t>(bits >> (8 * i));
      add(&byte, 1);
    }
    for (int i = 0; i < 32; ++i) {
      digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
  }

 private:
  static uint32_t turned(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

  void mix() {
    // The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
    static const uint32_t k[64] = {
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
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      w[i] = uint32_t(block_[4 * i]) << 24 | uint32_t(block_[4 * i + 1]) << 16 |
             uint32_t(block_[4 * i + 2]) << 8 | uint32_t(block_[4 * i + 3]);
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t low = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t high = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    uint32_t s[8];
    std::memcpy(s, state_, sizeof s);
    for (int i = 0; i < 64; ++i) {
      const uint32_t e = turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25);
      const uint32_t a = turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22);
      const uint32_t first = s[7] + e + ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
      const uint32_t second = a + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      std::memmove(s + 1, s, 7 * sizeof *s);
      s[4] += first;
      s[0] = first + second;
    }
    for (int i = 0; i < 8; ++i) {
      state_[i] += s[i];
    }
    used_ = 0;
  }

  // Likewise of the square roots of the first 8 primes.
  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t block_[64];
  size_t used_ = 0;
  uint64_t total_ = 0;
};

// The key has 32 bytes.
inline void hmac_sha256(const uint8_t* key, const uint8_t* data, size_t nbytes,
                        uint8_t digest[32]) {
  uint8_t inner[64], outer[64];
  for (int i = 0; i < 64; ++i) {
    const uint8_t byte = i < 32 ? key[i] : 0;
    inner[i] = byte ^ 0x36;
    outer[i] = byte ^ 0x5c;
  }
  Sha256 first, second;
  first.add(inner, 64);
  first.add(data, nbytes);
  first.finish(digest);
  second.add(outer, 64);
  second.add(digest, 32);
  second.finish(digest);
}

}  // namespace anychip
