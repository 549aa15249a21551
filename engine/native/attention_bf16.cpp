// Attention of bf16 over a pool of bf16.

#include "attention.h"

template void baton::attend_planned<baton::Bf16, baton::Bf16, baton::Bf16Word>(
    const baton::AttentionCall&);
