"""Decides; it owns no table. Its policy is pure, its tasks are woken by name."""
