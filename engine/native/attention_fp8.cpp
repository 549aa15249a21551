// Attention of bf16 over a pool of fp8.

#include "attention.h"

template void baton::attend_planned<baton::Bf16, baton::Fp8, baton::Bf16Word>(
    const baton::AttentionCall&);
