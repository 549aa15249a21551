// Attention of bf16 over a pool of quads.

#include "attention.h"

#if defined(BATON_PAIRS)
template void baton::attend_planned<baton::Bf16, baton::Split, baton::Bf16Word>(
    const baton::AttentionCall&);
#endif
