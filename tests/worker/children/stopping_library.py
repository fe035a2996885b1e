"""A library that stops the process which loads it, until somebody sends it SIGCONT: so a test sees who waits for it."""

from __future__ import annotations

import signal

signal.raise_signal(signal.SIGSTOP)
