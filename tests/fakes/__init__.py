"""Stand-ins for services of others, over the real wire: no code of ours can tell them from what they stand for."""
