"""`archipelago-agent`: enroll, run, doctor, status, train.

Invariant: whatever happens, a person reads one sentence of what and what to do, and a program an exit code from
errors.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from worker_agent import hardware
from worker_agent.agent import Agent, stamp
from worker_agent.client import Client, normalise_url
from worker_agent.errors import EXIT_OK, EXIT_PROBLEM, AgentError, Unauthorised
from worker_agent.launch.local import LocalLauncher
from worker_agent.protocol import PROTOCOL_VERSION, EnrolRequest
from worker_agent.state import DEFAULT_HOME, Home, identity_from

_EPILOG = """exit codes:
  0  done, drained or healthy
  1  an error; for doctor: at least one problem
  2  the command line is wrong
  5  the control plane did not answer
  6  not accepted: revoked, enrolled anew elsewhere, or a used or expired join token
  7  this agent is too old for the control plane
  8  another agent runs on this home
  9  not enrolled

The agent only dials out; it listens on no port. A proxy is taken from HTTPS_PROXY and NO_PROXY."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"]:
        return _train(arguments[1:])  # with options of its own, and no home
    options = _parser().parse_args(arguments)
    try:
        code: int = options.verb(options)
    except AgentError as error:
        if options.json:
            _print_json(
                {"ok": False, "error": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
            )
        else:
            print(f"archipelago-agent: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"archipelago-agent: {error}", file=sys.stderr)
        return EXIT_PROBLEM
    return code


def enroll(options: argparse.Namespace) -> int:
    home = Home(options.home)
    server = normalise_url(options.server)
    with home.locked():
        facts = hardware.read_facts(home.path, _simulation(options))
        with Client(server, user_agent=_user_agent()) as client:
            try:
                reply = client.enrol(EnrolRequest(protocol=PROTOCOL_VERSION, join_token=options.token, facts=facts))
            except Unauthorised as error:
                raise Unauthorised(
                    f"{error} A join token works once and for a short time (also when its reply was lost on the way): "
                    "make a new one on the island's page."
                ) from error
        home.save_identity(identity_from(reply, server))
    if options.json:
        _print_json({"ok": True, "agent_id": reply.agent_id, "island_id": reply.island_id, "epoch": reply.epoch})
    else:
        gpus = f"{len(facts.gpus)} GPUs ({facts.gpu_source})" if facts.gpus else f"no GPU: {facts.gpu_note}"
        _say(f"enrolled as {reply.agent_id} on island {reply.island_name}, epoch {reply.epoch}; {gpus}")
        _say(f"identity kept in {home.path}; start with: archipelago-agent run --home {home.path}")
    return EXIT_OK


def run(options: argparse.Namespace) -> int:
    home = Home(options.home)
    home.load_identity()
    simulation = _simulation(options)
    with home.locked():
        identity = home.load_identity()
        agent = Agent(
            home,
            Client(identity.server_url, timeout_s=options.timeout, user_agent=_user_agent()),
            LocalLauncher(),
            say=_say_json if options.json else _say,
            facts=lambda: hardware.read_facts(home.path, simulation),
            device=options.device,
        )
        return agent.run()


def doctor(options: argparse.Namespace) -> int:
    from worker_agent.doctor import examine

    findings = examine(Home(options.home), server=options.server)
    healthy = all(finding.state != "problem" for finding in findings)
    if options.json:
        _print_json({"healthy": healthy, "checks": [msgspec.to_builtins(finding) for finding in findings]})
    else:
        for finding in findings:
            print(f"{finding.state:<8} {finding.check:<12} {finding.message}")
            if finding.hint:
                print(f"{'':<21} -> {finding.hint}")
    return EXIT_OK if healthy else EXIT_PROBLEM


def status(options: argparse.Namespace) -> int:
    """From the disk alone: it neither calls the server nor disturbs a running agent."""
    from worker_agent.launch.local import is_alive, read_status

    home = Home(options.home)
    identity, memory = home.load_identity(), home.load_memory()
    pid = home.holder_pid()
    processes = [
        {
            "assignment_id": handle.assignment_id,
            "generation": handle.generation,
            "pid": handle.pid,
            "alive": is_alive(handle),
            "status": read_status(Path(handle.workdir)),
        }
        for handle in LocalLauncher().adopt(home.work_path)
    ]
    if options.json:
        _print_json(
            {
                "agent_id": identity.agent_id,
                "island_name": identity.island_name,
                "server_url": identity.server_url,
                "epoch": identity.epoch,
                "running_pid": pid,
                "island_state": memory.island_state,
                "last_sync_ms": memory.last_sync_ms,
                "assignments": [assignment.id for assignment in memory.assignments],
                "processes": processes,
            }
        )
        return EXIT_OK
    print(f"agent     {identity.agent_id} on {identity.island_name}, epoch {identity.epoch}")
    print(f"server    {identity.server_url}")
    print(f"running   {'no' if pid is None else f'process {pid}'}")
    if memory.last_sync_ms is None:
        print("last sync never")
    else:
        print(f"last sync {stamp(memory.last_sync_ms / 1000)} at the latest, island {memory.island_state}")
    for process in processes:
        said = process["status"]
        phase = said.get("state", "starting") if isinstance(said, dict) else "starting"
        print(f"work      {process['assignment_id']} process {process['pid']} {phase if process['alive'] else 'ended'}")
    return EXIT_OK


def _train(arguments: list[str]) -> int:
    missing = [name for name in ("torch", "safetensors", "numpy") if find_spec(name) is None]
    if missing:
        print(
            f"archipelago-agent: training needs {', '.join(missing)}: pip install 'archipelago-agent[trainer]'",
            file=sys.stderr,
        )
        return EXIT_PROBLEM
    from worker_agent.trainer.train import main as train_main

    return train_main(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="archipelago-agent",
        description="Puts this machine's GPUs on Archipelago: takes leases, meters them, runs trainers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"archipelago-agent {hardware.agent_version()}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--home", default=str(DEFAULT_HOME), help="the agent's folder (default: %(default)s)")
    shared.add_argument("--json", action="store_true", help="JSON instead of words")
    posed = argparse.ArgumentParser(add_help=False)
    posed.add_argument(
        "--simulate-gpus", type=_positive, metavar="N", help="pose N CPU slots as GPUs, marked as simulated"
    )
    posed.add_argument("--gpu-name", default="Simulated GPU", help="their name")
    verbs = parser.add_subparsers(required=True, metavar="command")

    verb = verbs.add_parser("enroll", parents=[shared, posed], help="join an island with a join token")
    verb.add_argument("--server", required=True, help="address of the control plane")
    verb.add_argument("--token", required=True, help="the join token from the island's page; works once")
    verb.set_defaults(verb=enroll)
    verb = verbs.add_parser("run", parents=[shared, posed], help="serve until a signal; SIGTERM drains")
    verb.add_argument("--device", default="auto", help="auto, cpu or cuda, for the trainers")
    verb.add_argument("--timeout", type=float, default=15.0, help="seconds to wait for one answer of the server")
    verb.set_defaults(verb=run)
    verb = verbs.add_parser("doctor", parents=[shared], help="check everything, with hints")
    verb.add_argument("--server", help="check this address instead of the enrolled one")
    verb.set_defaults(verb=doctor)
    verb = verbs.add_parser("status", parents=[shared], help="what this home knows, without a call to the server")
    verb.set_defaults(verb=status)
    verbs.add_parser("train", help="train on this machine alone, without a marketplace (see train --help)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _simulation(options: argparse.Namespace) -> hardware.Simulation | None:
    return None if options.simulate_gpus is None else hardware.Simulation(options.simulate_gpus, options.gpu_name)


def _user_agent() -> str:
    return f"archipelago-agent/{hardware.agent_version()}"


def _say(event: str) -> None:
    print(f"{stamp()}  {event}", flush=True)


def _say_json(event: str) -> None:
    _print_json({"at": stamp(), "event": event})


def _print_json(value: object) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)
