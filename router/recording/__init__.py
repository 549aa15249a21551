"""Records a router's traffic in a file that the simulator and `bench.replay` read: sizes, times and
digests, never text or token ids. Imports `router.requests`.
"""
