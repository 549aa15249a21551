"""From logits to tokens: sampler, top-p, penalties, grammars, log-probabilities of prompts.

Imports `scheduling` and `protocol`; only the modules that process logits need torch.
"""
