"""The doctor: what is wrong with a fleet, with evidence and the setting to change.

Pure: an `Observation` in, findings out; `router.telemetry.examination` observes,
`router.endpoints` and `router.dashboard` show. Imports `protocol` alone.
"""
