"""Facts about a fleet that need no percentile: which workers are usable, what each key gets, which
routers are alive, how much CPU the machines give. `console.doctor.facts` has their shapes.

Imports the fleet, traces and the counts at the door.
"""
