// One token's product with a panel of a blocked format.
//
// Memory bandwidth limits it, so codes are read once, and headers are not decoded in a separate pass: a run's scales
// and minima are decoded just before its codes are multiplied. All of a row's sums stay in registers. They are those of
// multiply_units, in the same order.
#pragma once
#include "unit_products.h"

namespace llmc {

// The runs of a panel, and what is fetched while one of them is multiplied: the codes kDistance bytes ahead. With this
// distance one core of a Zen 5 reads codes at 32 GB/s, and with three times the distance at 28.
class PanelRuns {
 public:
  PanelRuns(const CodePanels& panels, int64_t panel)
      : count(panels.in / panels.run),
        groups(panels.run / panels.group),
        header_bytes_(panels.header_bytes()),
        code_bytes_(panels.stored_words(panels.run) * LLMC_PANEL * 4),
        ahead_(std::max<int64_t>(1, kDistance / code_bytes_)),
        headers_(panels.header(panel, 0)),
        codes_(headers_ + count * header_bytes_),
        // The processor's own prefetcher reads codes of 4 bits ahead: see fetch_after.
        fetches_codes_(panels.bits != 4 || !is_read_ahead(1, 4)) {}

  const int64_t count, groups;  // of the panel, and of a run

  const uint8_t* header(int64_t run) const { return headers_ + run * header_bytes_; }
  const uint8_t* codes() const { return codes_; }
  // The codes that are fetched during a run: of a later one, or else the run's own, which are in cache.
  const uint8_t* codes_to_fetch(int64_t run) const {
    if (!fetches_codes_) return codes_ + run * code_bytes_;
    return codes_ + (run + ahead_) * code_bytes_ + (run + ahead_ < count ? 0 : count * header_bytes_);
  }
  __attribute__((always_inline)) void fetch_header(int64_t run) const {
    // Behind the codes are the headers of the next panel.
    const uint8_t* from = header(run + ahead_) + (run + ahead_ < count ? 0 : count * code_bytes_);
    for (const uint8_t* end = from + header_bytes_; from < end; from += 64) __builtin_prefetch(from);
  }

 private:
  static constexpr int64_t kDistance = 4096;

  const int64_t header_bytes_, code_bytes_, ahead_;  // of a run; runs
  const uint8_t *const headers_, *const codes_;
  const bool fetches_codes_;
};

// sums += a unit of all rows of a panel. header: the decoded scales and minima of its first group.
template <class Codes, int kVecs>
inline __attribute__((always_inline)) void add_unit(const uint8_t* unit, const float* header, const int32_t* x,
                                                    Vec (&sums)[kVecs]) {
  using Terms = IntegerTerms<true>;
#pragma GCC unroll 2
  for (int i = 0; i < Codes::kGroups; i++, header += Codes::kHeaderFloats, x += Codes::kXPerGroup) {
    VecInt dots[1][kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v++) dots[0][v] = first_dots<Codes>(x[0]);
    add_quads<Codes>(unit, i * Codes::kQuads, 0, x + 3, dots);
    const Vec scale = broadcast(Terms::scale<1>(x, 0)), less = broadcast(Terms::less<1>(x, 0));
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; v++) {
      if constexpr (Codes::kHasMinima) sums[v] = fma(load(header + LLMC_PANEL + v * kLanes), less, sums[v]);
      sums[v] = fma(__builtin_convertvector(dots[0][v], Vec), load(header + v * kLanes) * scale, sums[v]);
    }
  }
}

// Sets sums [LLMC_PANEL] to the products of a panel's rows and x, which is packed for UnitProduct. kBits, kLeast: of
// with_steps.
template <class Codes, int kBits, int kLeast>
void multiply_panel(const CodePanels& panels, int64_t panel, const int32_t* x, float* sums) {
  constexpr int kVecs = LLMC_PANEL / kLanes;
  constexpr int64_t kGroupsTogether = 16;  // whose scales and minima are decoded before their codes are multiplied
  alignas(64) float decoded[kGroupsTogether * Codes::kHeaderFloats];
  const PanelRuns runs(panels, panel);
  const uint8_t* unit = runs.codes();
  Vec held[kVecs] = {};
  for (int64_t run = 0; run < runs.count; run++) {
    const uint8_t* next = runs.codes_to_fetch(run);
    runs.fetch_header(run);
    for (int64_t first = 0; first < runs.groups; first += kGroupsTogether) {
      const int64_t count = std::min(kGroupsTogether, runs.groups - first);
      decode_run<kBits, kLeast, Codes::kHasMinima>(panels, runs.header(run), first, count, decoded);
      for (int64_t group = 0; group < count; group += Codes::kGroups) {
#pragma GCC unroll 16
        for (int64_t byte = 0; byte < Codes::kUnitBytes; byte += 64) __builtin_prefetch(next + byte);
        add_unit<Codes>(unit, decoded + group * Codes::kHeaderFloats, x, held);
        next += Codes::kUnitBytes;
        unit += Codes::kUnitBytes;
        x += Codes::kGroups * Codes::kXPerGroup;
      }
    }
  }
  for (int v = 0; v < kVecs; v++) store(sums + v * kLanes, held[v]);
}

}  // namespace llmc
