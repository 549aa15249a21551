"""From logits to tokens: the sampler, top-p, penalties, grammars, log-probabilities of prompts."""
