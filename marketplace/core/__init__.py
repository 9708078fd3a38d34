"""What every domain stands on: money, time, ids, errors, state changes. No models, no imports of ours."""
