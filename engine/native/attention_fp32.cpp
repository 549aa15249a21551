// Attention of fp32.

#include "attention.h"

template void baton::attend_planned<float, float, baton::FloatWord>(
    const baton::AttentionCall&);
template void baton::attend_planned<float, baton::Fp8, baton::FloatWord>(
    const baton::AttentionCall&);
