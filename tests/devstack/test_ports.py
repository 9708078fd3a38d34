from __future__ import annotations

import socket

from marketplace.devstack.ports import choose, free_port, is_free


def test_a_taken_port_is_not_free_and_another_is_chosen() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        taken = holder.getsockname()[1]
        assert not is_free(taken)
        other = choose(taken)
        assert other != taken
        assert is_free(other)


def test_a_free_port_is_kept() -> None:
    port = free_port()
    assert choose(port) == port
