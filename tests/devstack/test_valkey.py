from __future__ import annotations

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def test_the_broker_asks_for_its_password_and_keeps_nothing_on_disk(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.set("key", "value")
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        port = client.connection_pool.connection_kwargs["port"]
    with redis.Redis(port=port, retry=Retry(NoBackoff(), 0)) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_each_test_meets_an_empty_broker(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        assert client.dbsize() == 0
