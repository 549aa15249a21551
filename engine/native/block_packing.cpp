// Packing of quantized blocks, and what is packed.

#include "block_linear.h"

#if defined(BATON_PAIRS)

namespace baton {

void pack_part(const FileRows& rows, const int64_t* order, int outputs, const BlockPart& part) {
  const int panels = (outputs + kPanelOutputs - 1) / kPanelOutputs;
  with_format(part.kind, [&](auto format) {
    using Format = decltype(format);
#pragma omp parallel for schedule(static)
    for (int panel = 0; panel < panels; ++panel) {
      const int first = panel * kPanelOutputs, left = outputs - first;
      pack_blocks<Format>(part.kind, rows, order + first,
                          left < kPanelOutputs ? left : kPanelOutputs,
                          (char*)part.panels + panel * Format::panel_bytes(rows.inputs));
    }
  });
}

void part_values(const BlockPart& part, int inputs, int outputs, float* to) {
  with_format(part.kind, [&](auto format) {
    using Format = decltype(format);
    for (int o = 0; o < outputs; ++o) {
      const char* panel = part.panels + o / kPanelOutputs * Format::panel_bytes(inputs);
      for (int g = 0; g < inputs / Format::kInputs; ++g)
        group_values(part.kind, packed_group<Format>(panel, g, o % kPanelOutputs),
                     to + (int64_t)o * inputs + g * Format::kInputs);
    }
  });
}

}  // namespace baton

#endif
