"""Other ways to place requests, to compare Baton's with: `pools` chooses within a pool, `choices`
makes decisions of that, `names` lists them. Pure. Imports `router` and `protocol`."""
