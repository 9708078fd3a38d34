"""Toy children for the supervisor's tests, and a look at what still runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

from marketplace.devstack.supervise import Child

SLEEPER = "import time; time.sleep(600)"
# Starts a child of its own and then sleeps: what a killed group leader leaves behind.
FAMILY = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); time.sleep(600)"


def toy(name: str, code: str, folder: Path, mark: str = "") -> Child:
    env = {**os.environ, "TOY_MARK": mark}
    return Child(name, [sys.executable, "-c", code], env, folder / f"{name}.log", folder, patience_s=2.0)


def marked(mark: str) -> list[int]:
    """Living processes that carry the mark in their environment, ourselves left out."""
    found = []
    for process in psutil.process_iter():
        try:
            carries = process.pid != os.getpid() and process.environ().get("TOY_MARK") == mark
            if carries and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
