// Which weights the processor's own prefetcher brings into cache sooner than a loop that asks for them.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace llmc {

// Whether it keeps more lines of a stream on their way than the core has miss buffers, which software prefetches fill.
// So on Zen 4: a core's product of one token reads 4-bit codes at 24.4 instead of 16.3 GB/s if it does not ask, and two
// cores at 43 instead of 30 (bf16: 24.3 and 21.5, 48 and 42); with weights in huge pages at 1.01 to 1.06 times the rate
// (bf16: 1.10 to 1.16). Asking is better on a Zen 3 (two cores: 4-bit codes at 32 instead of 22 GB/s, 8-bit ones at 35
// instead of 25) and on a Zen 5 (42 instead of 37 GB/s on a core); others were not measured, and ask.
inline bool has_far_prefetcher() {
#if defined(__x86_64__)
  static const bool known = [] {
    unsigned int highest, vendor, more, rest, signature;
    if (__get_cpuid(0, &highest, &vendor, &more, &rest) == 0 || vendor != signature_AMD_ebx) return false;
    if (__get_cpuid(1, &signature, &vendor, &more, &rest) == 0) return false;
    const unsigned int family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
    const unsigned int model = (signature >> 4 & 0xf) | (signature >> 12 & 0xf0);
    // Family 19h is Zen 3 and Zen 4; models of Zen 4: 10h to 1fh, 60h to 7fh, a0h and above.
    return family == 0x19 && (model >> 4 == 1 || model >> 4 == 6 || model >> 4 == 7 || model >= 0xa0);
  }();
  return known;
#else
  return false;
#endif
}

// Whether a product of `tokens` tokens leaves its weights to the hardware prefetcher. With more than `waiting` tokens
// arithmetic limits the product, and evenly spaced software prefetches save up to a tenth of its time on any processor.
inline bool is_read_ahead(int64_t tokens, int64_t waiting) { return tokens <= waiting && has_far_prefetcher(); }

}  // namespace llmc
