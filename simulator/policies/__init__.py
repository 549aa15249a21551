"""Other placement policies to compare Baton's with. `pools` has rules that choose within a pool,
`choices` makes decisions with these rules, and `names` lists the policies. Pure. Imports `router`
and `protocol`."""
