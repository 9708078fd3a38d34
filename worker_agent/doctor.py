"""`archipelago-agent doctor`: every condition the agent needs, checked and said in words, each with a hint.

Invariant: it changes nothing, it may run beside a running agent, and it never sends the credential to an address other
than the one it was issued by.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx
import msgspec

from worker_agent import hardware
from worker_agent.client import API_PATH, error_of, normalise_url
from worker_agent.clock import wall_ms
from worker_agent.errors import AgentError, NotEnrolled
from worker_agent.protocol import PROTOCOL_VERSION, SyncRequest
from worker_agent.spool import inspect
from worker_agent.state import Home, Identity
from worker_agent.telemetry import read_gpus

_TIMEOUT_S = 5.0
_DISK_LOW_MIB = 2048
_CLOCK_LIMIT_S = 30
_TORCH = "import torch; print(torch.__version__, torch.cuda.device_count())"


class Finding(msgspec.Struct, frozen=True):
    check: str
    state: Literal["ok", "note", "problem"]
    message: str
    hint: str = ""


def examine(home: Home, server: str | None = None) -> list[Finding]:
    findings = [*_home(home)]
    identity: Identity | None = None
    try:
        identity = home.load_identity()
    except NotEnrolled as error:
        findings.append(Finding("identity", "problem", str(error), "make a join token on the island's page and enroll"))
    except AgentError as error:
        findings.append(Finding("identity", "problem", str(error), "enroll again; the damaged file is of no use"))
    else:
        words = f"{identity.agent_id} on {identity.island_name}, epoch {identity.epoch}"
        findings.append(Finding("identity", "ok", words))
    address = server or (identity.server_url if identity is not None else None)
    if address is not None:
        findings.extend(_server(address, identity, home.holder_pid()))
    findings.extend(_proxy())
    findings.extend(_gpus())
    findings.extend(_torch())
    findings.extend(_disk(home))
    findings.extend(_spool(home, identity))
    findings.extend(_ports(home))
    return findings


def _home(home: Home) -> Iterator[Finding]:
    if not home.path.is_dir():
        yield Finding("home", "problem", f"{home.path} does not exist", "enroll makes it")
        return
    for path in (home.path, home.identity_path, home.memory_path):
        if path.exists() and path.stat().st_mode & 0o077:
            yield Finding("home", "problem", f"{path} is open to other users", f"chmod go-rwx {path}")
            return
    if not os.access(home.path, os.W_OK):
        yield Finding("home", "problem", f"{home.path} cannot be written", "run as the user who enrolled")
        return
    yield Finding("home", "ok", f"{home.path}, closed to other users")


def _server(address: str, identity: Identity | None, running: int | None) -> Iterator[Finding]:
    try:
        url = normalise_url(address)
    except AgentError as error:
        yield Finding("server", "problem", str(error))
        return
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        yield Finding("dns", "ok", f"{host} is {', '.join(sorted(found))}")
    except OSError as error:
        yield Finding(
            "dns", "problem", f"{host} has no address: {error}", "check the name, and this machine's resolver"
        )
        return
    # A proxy makes the direct connection neither needed nor expected to work: the HTTP check below goes through it.
    if not any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY")
    ):
        try:
            with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
                yield Finding("tcp", "ok", f"{host}:{port} takes connections")
                if parts.scheme == "https":
                    with ssl.create_default_context().wrap_socket(connection, server_hostname=host) as tls:
                        yield Finding("tls", "ok", f"{tls.version()}, certificate accepted")
                else:
                    yield Finding(
                        "tls",
                        "note",
                        "plain HTTP: the credential travels in the clear",
                        "use https outside a laboratory",
                    )
        except ssl.SSLError as error:
            yield Finding(
                "tls",
                "problem",
                f"certificate refused: {error}",
                "is a proxy opening TLS? set SSL_CERT_FILE to its authority",
            )
            return
        except OSError as error:
            yield Finding(
                "tcp",
                "problem",
                f"{host}:{port} cannot be reached: {error}",
                "open this address for outgoing connections",
            )
            return
    yield from _http(url, identity, running)


def _http(url: str, identity: Identity | None, running: int | None) -> Iterator[Finding]:
    """An unfinished sync with epoch 0 and no beat: it proves the credential and cannot change anything, since the
    control plane refuses an epoch that is not the current one only after it has accepted the credential."""
    trusted = identity is not None and identity.server_url == url
    headers = {"Authorization": f"Bearer {identity.credential}"} if identity is not None and trusted else {}
    probe = SyncRequest(protocol=PROTOCOL_VERSION, epoch=0, boot_id="doctor", beat=0, agent_time_ms=wall_ms())
    try:
        response = httpx.post(
            f"{url}{API_PATH}sync", content=msgspec.json.encode(probe), headers=headers, timeout=_TIMEOUT_S
        )
    except httpx.TransportError as error:
        yield Finding("http", "problem", f"no HTTP answer: {error}", "check the proxy settings and the server")
        return
    status = response.status_code
    if status >= 500 or status == 404:
        yield Finding(
            "http", "problem", f"{url} answers {status} to the agent API", "is this the address of the control plane?"
        )
    else:
        yield Finding("http", "ok", f"the agent API answers ({status})")
    yield from _clock(response)
    if not trusted:
        return
    if status in (401, 403, 410) and error_of(response).code != "stale_epoch":
        yield Finding(
            "credential",
            "problem",
            f"not accepted ({status}): revoked or replaced",
            "enroll again with a new join token",
        )
    elif status < 500 and status != 404:
        yield Finding("credential", "ok", "accepted")


def _clock(response: httpx.Response) -> Iterator[Finding]:
    try:
        server_s = parsedate_to_datetime(response.headers["Date"]).timestamp()
    except (KeyError, ValueError):
        return
    offset = wall_ms() / 1000 - server_s
    words = f"this machine's clock is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} the server's"
    if abs(offset) > _CLOCK_LIMIT_S:
        yield Finding("clock", "note", words, "nothing breaks (deadlines use the server's time), but TLS may; use NTP")
    else:
        yield Finding("clock", "ok", words)


def _proxy() -> Iterator[Finding]:
    names = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
    found = [name for name in names if os.environ.get(name) or os.environ.get(name.lower())]
    yield Finding("proxy", "ok", f"set: {', '.join(found)}" if found else "none set: connections go out directly")


def _gpus() -> Iterator[Finding]:
    gpus, note = read_gpus()
    if not gpus:
        yield Finding("gpus", "note", note, "the machine can serve with --simulate-gpus for a trial only")
        return
    names = sorted({gpu.name for gpu in gpus})
    yield Finding("gpus", "note" if note else "ok", f"{len(gpus)}: {', '.join(names)}{'; ' + note if note else ''}")


def _torch() -> Iterator[Finding]:
    """In a process of its own: an import that crashes or takes long is the very thing to find out."""
    try:
        done = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(
            "torch", "problem", "importing torch took over 120 s", "is the environment on a slow network disk?"
        )
        return
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        yield Finding(
            "torch", "note", f"cannot be imported: {last}", "to train: pip install 'archipelago-agent[trainer]'"
        )
        return
    version, _, devices = done.stdout.strip().partition(" ")
    yield Finding("torch", "ok", f"{version}, sees {devices} CUDA devices")


def _disk(home: Home) -> Iterator[Finding]:
    free = hardware.disk_free_mib(home.path)
    if free is None:
        yield Finding("disk", "note", "free space cannot be read")
    elif free < _DISK_LOW_MIB:
        yield Finding("disk", "problem", f"{free} MiB free", "checkpoints need room: free some, or move --home")
    else:
        yield Finding("disk", "ok", f"{free:,} MiB free")


def _spool(home: Home, identity: Identity | None) -> Iterator[Finding]:
    if identity is None or not home.spool_path.exists():
        yield Finding("spool", "ok", "nothing metered yet")
        return
    try:
        state = inspect(home.spool_path)
    except OSError as error:
        yield Finding("spool", "problem", f"{home.spool_path} cannot be read: {error}", "check its owner and the disk")
        return
    words = f"{state.assignments} counters, {state.pending} waiting for the server, {state.damaged_lines} damaged lines"
    yield Finding("spool", "note" if state.damaged_lines else "ok", words)


def _ports(home: Home) -> Iterator[Finding]:
    pid = home.holder_pid()
    if pid is None:
        yield Finding("ports", "ok", "the agent is not running; when it is, it listens on none")
        return
    ports = listening_ports(pid)
    if ports:
        yield Finding(
            "ports", "problem", f"process {pid} listens on {ports}", "this is not our agent: look at that process"
        )
    else:
        yield Finding("ports", "ok", f"process {pid} listens on none")


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which exactly this process listens."""
    inodes = set()
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed since the listing
            target = os.readlink(descriptor)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            if columns[3] == "0A" and columns[9] in inodes:
                ports.add(int(columns[1].rpartition(":")[2], 16))
    return sorted(ports)
