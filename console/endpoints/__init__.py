"""HTTP endpoints that show operators the running fleet, and show clients their own requests.

Imports `console.telemetry` and `http_kit`.
"""
