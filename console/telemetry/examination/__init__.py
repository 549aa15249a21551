"""What the doctor is shown: the fleet's last ten minutes, sampled, and its newest diagnosis.

Imports `console.doctor`, the fleet, traces and the rest of `console.telemetry`.
"""
