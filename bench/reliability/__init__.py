"""Loads, faults and inputs of the chaos, soak and fuzzing benchmarks."""
