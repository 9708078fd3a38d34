"""Tables of this domain."""
