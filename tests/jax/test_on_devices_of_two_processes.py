"""A ring over the devices of two processes: fresh ones, for a process can join one job only."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("one_of_two_processes.py")


def test_two_processes_are_one_ring():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = [
        subprocess.Popen(
            [sys.executable, SCRIPT, address, str(number)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for number in range(2)
    ]
    try:
        ended = [process.communicate(timeout=100) for process in both]
    finally:
        for process in both:
            process.kill()
    assert all(process.returncode == 0 for process in both), [stderr[-2000:] for _, stderr in ended]
    assert all(float(stdout.splitlines()[-1]) < 1e-12 for stdout, _ in ended)  # gloo prints before
