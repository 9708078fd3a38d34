"""`make demo`: the product's main job, end to end, told in the terminal.

Everything happens as a customer does it: over the REST API, with real agents as processes of this machine. What is
told at the end is read back from the API; the exit code is 0 only if every claim of the story holds.
"""
