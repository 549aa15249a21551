"""The messages of control connections: what `protocol.wire` decodes there."""

from __future__ import annotations

from protocol.handoff_messages import (
    CacheAsk,
    CachedPrefix,
    CacheOffer,
    HandoffToken,
    KvAsk,
    KvBegun,
    KvClosed,
    KvFetch,
    KvGrant,
    KvRenew,
    PeerDescriptor,
    PoolRefused,
    PoolUnreachable,
)
from protocol.messages import (
    Abort,
    AttemptFailed,
    CacheDump,
    CacheDumpRequest,
    FirstToken,
    FlightPage,
    FlightRequest,
    Generate,
    HandedOver,
    HandOver,
    Hello,
    HelloAccepted,
    HelloRefused,
    NotKept,
    Ping,
    Pong,
    Prefill,
    PrefillDone,
    Resume,
    Resumed,
    SetLimits,
    StepTokens,
)
from protocol.weight_messages import (
    WeightsAsk,
    WeightsClose,
    WeightsGrant,
    WeightsOffer,
    WeightsRefused,
)

ControlMessage = (
    Hello
    | HelloAccepted
    | HelloRefused
    | Ping
    | Pong
    | Generate
    | Prefill
    | Abort
    | Resume
    | HandOver
    | CacheDumpRequest
    | CacheDump
    | SetLimits
    | FlightRequest
    | FlightPage
    | StepTokens
    | FirstToken
    | Resumed
    | NotKept
    | PrefillDone
    | HandedOver
    | AttemptFailed
    | PeerDescriptor
    | KvAsk
    | KvBegun
    | KvGrant
    | KvFetch
    | KvRenew
    | HandoffToken
    | KvClosed
    | PoolUnreachable
    | PoolRefused
    | CacheOffer
    | CacheAsk
    | CachedPrefix
    | WeightsAsk
    | WeightsOffer
    | WeightsGrant
    | WeightsRefused
    | WeightsClose
)
