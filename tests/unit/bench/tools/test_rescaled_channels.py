"""A checkpoint with rescaled channels computes the same with other weights."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.tools.rescaled_channels import rescaled


def test_logits_stay_and_all_matrices_of_layers_change():
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=70,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 70, (1, 30))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    logits = model(tokens).logits
    after = rescaled(before, config.num_key_value_heads)
    model.load_state_dict(after)
    torch.testing.assert_close(model(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {"model.embed_tokens.weight"}
