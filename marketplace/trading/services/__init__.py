"""What others may do with leases: rent, extend, end, settle."""

from marketplace.trading.services.ending import Swept, end_lease, lease_done, settle, sweep_leases
from marketplace.trading.services.renting import extend, rent

__all__ = ["Swept", "end_lease", "extend", "lease_done", "rent", "settle", "sweep_leases"]
