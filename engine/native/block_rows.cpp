// Linear layers of quantized blocks by vectors.

#include "vector_linear.h"

#if defined(BATON_PAIRS) && !defined(__AMX_BF16__)
void baton::block_rows(const LinearCall& call, const LeftRows& left, const InputSums& input_sums,
                       const Item& item, float* sums) {
  const BlockPart& part = part_of_panel(call.weight, item.panel);
  with_format(part.kind, [&](auto format) {
    const char* panel =
        part.panels + (item.panel - part.first) * format.panel_bytes(call.weight.inputs);
    block_item(format, call, left, input_sums, panel, item, sums);
  });
}
#endif
