"""Measured facts about a running fleet, gathered and summed up as JSON for operators.

Endpoints, page and metrics add nothing to these numbers. Imports `console.doctor`, `router` and
`http_kit`. Parts:

- `fleet_report.py`: the object of `GET /fleet`, which is also the dashboard stream's event `fleet`.
- `request_log.py`: rows, traces and receipts of single requests; `other_routers.py`: what other
  routers report. What happened to one request: `router/requests/trace.py`.
- `otlp.py`: traces for a collector; `perfetto.py`: a trace as a file.
"""
