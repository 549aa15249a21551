"""The doctor's input, which is the fleet's last ten minutes, sampled; and the newest diagnosis.

Imports `console.doctor`, the fleet, traces and the rest of `console.telemetry`.
"""
