"""The trainer: one model, many islands, DiLoCo rounds between them.

A library of its own, usable without the marketplace. Invariant: the rest of the agent is never imported from here, only
`worker_agent.protocol`; and importing this package does not import torch, so that a caller may read the exit codes or
the configuration without paying for it.

    python -m worker_agent.trainer --config run.json     one member of a job, against a coordinator (see run.py)
    worker_agent.trainer.train.train(run, learners=4)    a whole run in this process, with no coordinator elsewhere

Map: layout (names and shapes to one flat vector) < state (that vector, its momentum, its digest) < outer (one round's
arithmetic); codec (a vector to bytes); model, data, shards, optim, inner (H steps of one island); exchange,
exchange_http, exchange_local, checks (how rounds are agreed); distributed (several processes of one island); assemble,
watch, learner (the round loop); status, run, train.
"""

from __future__ import annotations
