"""How an assignment becomes processes: one file a launcher, the same four functions in each."""
