"""Results that papers published, beside the simulator's: `python -m bench.published`.

`mooncake` has policies and caches on Mooncake's traces, `distserve` goodput of fleets that split,
`sarathi` chunks and token budgets. Ratios and orders are compared, not seconds.
Imports `simulator`.
"""
