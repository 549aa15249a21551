"""The doctor: what is wrong with a fleet, with evidence and the setting to change.

Pure: an `Observation` in, findings out; `console.telemetry.examination` observes,
`console.endpoints` and `console.dashboard` show. Imports `protocol` alone.
"""
