#!/bin/sh
# Enrols once, with the one-time join token, and from then on runs as who it became.
set -eu
if ! archipelago-agent status --home "$ARCHIPELAGO_HOME" >/dev/null 2>&1; then
    : "${ARCHIPELAGO_JOIN_TOKEN:?set ARCHIPELAGO_JOIN_TOKEN to a join token: the page of the island makes one}"
    # shellcheck disable=SC2086 # several options in one variable
    archipelago-agent enroll --home "$ARCHIPELAGO_HOME" --server "$ARCHIPELAGO_SERVER" \
        --token "$ARCHIPELAGO_JOIN_TOKEN" ${ARCHIPELAGO_ENROLL_ARGS:-}
fi
# shellcheck disable=SC2086
exec archipelago-agent run --home "$ARCHIPELAGO_HOME" ${ARCHIPELAGO_RUN_ARGS:-}
