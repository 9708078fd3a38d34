"""The agent as a process, with the fake trainer in place of the real one: `python run_agent.py HOME`."""

from __future__ import annotations

import sys
from pathlib import Path

from worker_agent import hardware
from worker_agent.agent import Agent
from worker_agent.client import Client
from worker_agent.errors import AgentError
from worker_agent.launch.local import LocalLauncher
from worker_agent.state import Home

TRAINER = Path(__file__).with_name("fake_trainer.py")


def main() -> int:
    home = Home(sys.argv[1])
    try:
        with home.locked():
            client = Client(home.load_identity().server_url, timeout_s=3)
            agent = Agent(
                home,
                client,
                LocalLauncher([sys.executable, str(TRAINER)]),
                say=lambda event: print(event, flush=True),
                facts=lambda: hardware.read_facts(home.path, hardware.Simulation(4)),
            )
            return agent.run()
    except AgentError as error:
        print(error, flush=True)
        return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
