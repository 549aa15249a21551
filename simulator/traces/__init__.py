"""Recorded and generated traffic as sessions of turns, whatever the file looks like.

`sessions` says what a turn is and which blocks it repeats; `files` tells the formats apart;
`mooncake`, `azure`, `agents` and `recorded` read theirs, and `generated` makes traffic up. Imports
`protocol`, and of the router the format that it records.
"""
