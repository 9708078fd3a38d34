"""The embedded stack: PostgreSQL, Valkey, web, worker and beat as children of one process on this machine.

Invariant: nothing started here outlives the process that started it, however that process ends.
"""
