"""Kill and stop real processes at random moments while clients read, and compare every stream with a fault-free run.

`faults`, `streams` and `figures` are pure: what is done to whom and when, and what the clients' records amount to.
`processes`, `load` and `observer` touch the world; `campaign` ties them together, `suite` lists the campaigns.
"""
