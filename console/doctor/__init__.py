"""The doctor: the faults of a fleet, with evidence and the setting to change.

Pure: takes an `Observation`, returns findings. `console.telemetry.examination` observes,
`console.endpoints` and `console.dashboard` show. Imports `protocol` alone.
"""
