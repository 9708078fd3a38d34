"""A real process with the trainer's contract and none of its work. What it does is told by the name of the job's token:

run-...     write a status, then wait for SIGTERM, then end with 0
stubborn... the same, but it ignores SIGTERM
fail-...    say why, end with 1
done-...    end with 0 at once
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path


def main() -> int:
    config = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    workdir = Path(config["workdir"])
    stop = threading.Event()
    ignore = config["member_token"].startswith("stubborn")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore else lambda *_: stop.set())

    def say(state: str, **more: object) -> None:
        temporary = workdir / ".status.tmp"
        temporary.write_text(json.dumps({"state": state, "pid": os.getpid(), **more}))
        temporary.rename(workdir / "status.json")

    if config["member_token"].startswith("fail"):
        print("no such dataset", file=sys.stderr)
        say("failed", message="no such dataset", exit_code=1)
        return 1
    if not config["member_token"].startswith("done"):
        say("training")
        stop.wait(60)  # a test that forgets it must not leave it for ever
    say("done", exit_code=0)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
