"""One model on several ranks; each rank holds some of every layer's heads and intermediate width.

Rank 0 leads: it schedules, announces each step to the others, and chooses the tokens. The others
follow: they run the same step on their shards of weights and KV pool, block for block. Products
over a split dimension (o's over the heads, down's over the intermediate width) give partial sums;
one all-reduce per half layer adds them and the residual. Embedding and lm_head are split by
vocabulary; norms are replicated. The loss of a rank breaks the group: ranks that wait for it raise.
Imports the models and layers of `engine`, and no other backend.
"""
