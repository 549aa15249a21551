"""From settings to fleets: devices, pools and links."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from process.settings.home_paths import home_path
from protocol.errors import ConfigError
from protocol.messages import Role
from router.routing.placement import NO_TARGETS, Targets
from scheduling.scheduler import Scheduler, SchedulerConfig
from scheduling.step_model import StepModel
from simulator.commands.settings import SimulationSettings
from simulator.delays import Delays
from simulator.devices.cards import Card, card_named, read_card
from simulator.devices.model_shape import ModelShape, model_shape
from simulator.devices.roofline import Precision, Roofline
from simulator.devices.step_times import StepTimes
from simulator.fleet import FleetSpec
from simulator.policies.choices import Policy
from simulator.traces.files import TraceOptions, read_trace
from simulator.traces.sessions import Trace
from simulator.worker_spec import WorkerSpec

_MOST_CARDS = 64


@dataclass(frozen=True)
class Size:
    """The workers of a fleet; without prefill workers the decode workers compute the prompts."""

    prefill: int
    decode: int

    @property
    def name(self) -> str:
        """The fleet in words."""
        if not self.prefill:
            return f"{self.decode} colocated"
        return f"{self.prefill} prefill + {self.decode} decode"


def trace_options(settings: SimulationSettings) -> TraceOptions:
    """Which part of the trace the settings use, and how fast."""
    return TraceOptions(settings.seed, settings.speed, settings.limit, settings.span_s)


def load_trace(settings: SimulationSettings) -> Trace:
    """The trace of the settings. Raises ConfigError."""
    trace = read_trace(settings.trace, trace_options(settings))
    recorded = trace.block_tokens
    size = settings.block_size
    if recorded is not None and recorded % size and size % recorded:
        raise ConfigError(
            f"--block-size {size}: the trace's blocks have {recorded} tokens; one of these numbers "
            "must be a multiple of the other"
        )
    return trace


class Devices:
    """The model on the cards of the settings, and the fleets that can be made of them."""

    def __init__(self, settings: SimulationSettings) -> None:
        self._settings = settings
        self._shape: ModelShape = model_shape(settings.model)
        path = home_path(settings.gpu, "--gpu")
        self._card: Card
        self._measured: StepTimes | None = None
        if path.is_file():
            self._card, self._measured = read_card(path)
        else:
            self._card = card_named(settings.gpu)
        self._precision = Precision(settings.weight_bits / 8, settings.kv_bits / 8)
        self.num_cards = settings.tp or self.fewest_cards()

    @property
    def card_name(self) -> str:
        """The card in words."""
        return self._card.name

    @property
    def model_name(self) -> str:
        """The model in words."""
        return self._shape.name

    def check_split(self, num_cards: int) -> None:
        """Raises ConfigError if the model cannot be split over so many GPUs of a worker."""
        try:
            self._shape.check_split(num_cards)
        except ConfigError as error:
            raise ConfigError(f"--tp {num_cards}: {error}") from None

    def can_split(self, num_cards: int) -> bool:
        """Whether the model can be split over so many GPUs of a worker."""
        with suppress(ConfigError):
            self.check_split(num_cards)
            return True
        return False

    def fewest_fitting(self) -> int:
        """The fewest cards, a power of two, with room for the KV of some long prompts."""
        count, share = 1, 0.75
        weights = self._shape.num_params * self._precision.weight_bytes
        while weights > self._card.memory_bytes * count * share and count < _MOST_CARDS:
            count *= 2
        return count

    @property
    def title(self) -> str:
        """Model and devices in words."""
        return f"{self._shape.name} on {self._card.name}, {self.num_cards} for each worker"

    def fewest_cards(self) -> int:
        """The fewest cards, a power of two, whose memory the weights fill at most by half."""
        weights = self._shape.num_params * self._precision.weight_bytes
        count = 1
        while weights > self._card.memory_bytes * count / 2 and count < _MOST_CARDS:
            count *= 2
        return count

    def fleet(self, size: Size, policy: Callable[[], Policy]) -> FleetSpec:
        """A fleet of this size. Raises ConfigError if the model does not fit or cannot be split
        over the GPUs of a worker."""
        settings = self._settings
        self.check_split(self.num_cards)
        pools = ((Role.PREFILL, size.prefill), (Role.DECODE, size.decode))
        link = self._card.network_bytes_per_s * self.num_cards
        if settings.link_gbps is not None:
            link = settings.link_gbps * 1e9 / 8
        return FleetSpec(
            tuple((self._worker(role), count) for role, count in pools if count),
            policy,
            link,
            settings.link_latency_us / 1e6,
            Delays(
                settings.message_ms / 1e3,
                report_s=settings.report_ms / 1e3,
                tell_s=settings.tell_ms / 1e3,
            ),
            settings.routers,
            Targets(settings.ttft_ms, settings.tpot_ms) if settings.name_targets else NO_TARGETS,
            settings.refuse_late,
        )

    def _worker(self, role: Role) -> WorkerSpec:
        settings = self._settings
        roofline = Roofline(self._card, self._shape, self.num_cards, self._precision)
        size = settings.block_size
        chunk = settings.decode_chunk_tokens
        if role is Role.PREFILL:
            chunk = settings.prefill_chunk_tokens
        config = SchedulerConfig(
            block_size=size,
            max_batch_size=settings.max_batch_size,
            chunk_min_tokens=size,
            chunk_max_tokens=max(chunk, size),
            itl_target_s=settings.itl_target_ms / 1e3,
        )
        num_blocks = settings.num_blocks or roofline.pool_blocks(size)
        layout = self._shape.kv_layout(size, self._precision.kv_bytes, settings.kv_windows)
        spec = WorkerSpec(
            role,
            config,
            num_blocks,
            roofline.kv_bytes_per_token * size,
            settings.max_context or self._shape.max_positions,
            self._measured or roofline,
            self.num_cards,
            layout=layout if layout.grouping else None,
            windows=tuple(window for window, _ in self._shape.windows),
        )
        longest = Scheduler(config, spec.pools(), StepModel()).most_tokens
        return replace(spec, max_context=min(spec.max_context, longest))
