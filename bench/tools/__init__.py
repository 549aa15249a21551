"""What several benchmarks share: checkpoints, processes, fleets, loads over HTTP."""
