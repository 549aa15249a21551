"""Builds, checks and measurements of the engine on a CUDA card."""
