"""The decisions, pure: a frozen state of the market goes in, decisions with their reasons come out.

No Django, no clock, no randomness, no network: the same state always gives the same decisions, so that a tick can be
replayed, simulated and tested without anything running.
"""
