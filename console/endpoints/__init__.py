"""What operators read of a running fleet over HTTP, and clients of their own requests.

Imports `console.telemetry` and `http_kit`.
"""
