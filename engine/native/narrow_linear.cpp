// Linear layers of 12 bits by vectors.

#include "vector_linear.h"

#if defined(BATON_PAIRS) && !defined(__AMX_BF16__)
template void baton::bf16_item<true>(const baton::LinearCall&, const baton::Item&,
                                     const baton::LeftRows&, baton::Unpacked&, float*);
#endif
