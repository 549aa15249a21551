"""What operators are shown of a running fleet: measured facts, gathered and summed up, as JSON.

The dashboard reads this package and adds nothing to its numbers. Imports `router.requests`,
`router.fleet`, `router.http` and `router.routing`, and nothing above them. Parts:

- `requests.py`: rows, traces and receipts of single requests; `peers.py`: what other routers tell.
- `metrics.py`: the same numbers for Prometheus, and under vLLM's names; `otlp.py`: traces for a
  collector; `perfetto.py`: a trace as a file.
- `report.py`: the object of `GET /fleet`, which is also the dashboard stream's event `fleet`.
- `requests/trace.py`, one room below: what happened to one request.
- `router/dashboard/`: the page, its files, its stream, findings and controls. Those rooms call
  `FleetReport.as_json()`; they compute no figure of the fleet themselves.
"""
