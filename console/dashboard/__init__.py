"""The operators' page at `/dashboard`: its files, its stream of summaries, its controls.

Shows what `console.telemetry` measured and computes no figure of its own. `page/` holds the files
that a browser loads, `vendor/` the one library they use. Imports `console.telemetry`, `router`,
`http_kit`, `process` and `protocol`.
"""
