"""The choice of experts, against the routers of transformers' DeepSeek V2 and V3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from checkpoint.json_keys import JsonKeys
from engine.checkpoint.experts_config import ExpertsConfig, parse_experts
from engine.layers.routing import choose
from engine.models.architectures import DEEPSEEK_EXPERTS

HIDDEN = 32
OF_ALL = {
    "hidden_size": HIDDEN,
    "n_routed_experts": 24,
    "num_experts_per_tok": 5,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}


def parsed(**keys: Any) -> ExpertsConfig:
    experts, mixed = parse_experts(JsonKeys(OF_ALL | keys, "config.json"), DEEPSEEK_EXPERTS, 3)
    assert mixed == (False, True, True)
    assert experts is not None
    assert experts.shared_inner == 32
    return experts


def assert_same_choice(router: Any, config: ExpertsConfig) -> None:
    x = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(2))
        _, expected, theirs = router(x)
        weights = torch.zeros(200, config.count).scatter_(1, theirs, expected)
        bias = router.e_score_correction_bias if config.has_choice_bias else None
        chosen, found = choose(config, linear(x, router.weight), bias)
    torch.testing.assert_close(torch.zeros(200, config.count).scatter_(1, chosen, found), weights)


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (6, 3), (8, 8)])
def test_of_deepseek_v3(groups, normalizes):
    options = {"n_group": groups[0], "topk_group": groups[1], "norm_topk_prob": normalizes}
    router = DeepseekV3TopkRouter(DeepseekV3Config(**OF_ALL, **options))
    router.e_score_correction_bias.normal_(generator=torch.Generator().manual_seed(3))
    assert_same_choice(router, parsed(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"topk_method": "greedy", "n_group": None, "topk_group": None},
        {"topk_method": "group_limited_greedy", "n_group": 6, "topk_group": 3},
    ],
)
def test_of_deepseek_v2(options):
    router = DeepseekV2TopkRouter(DeepseekV2Config(**OF_ALL, **options))
    assert_same_choice(router, parsed(**options, scoring_func="softmax", norm_topk_prob=False))
