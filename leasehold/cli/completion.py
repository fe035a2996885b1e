"""`leasehold completion SHELL` prints a script that lets the shell complete commands and options.

The library typer has the scripts, and computes the completions. It would also add two options to every help page, and
one of these options edits files in the user's home. So main.py turns both options off.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

#: The completion script runs `leasehold` with this variable set, and `leasehold` then prints the completions.
_VARIABLE = "_LEASEHOLD_COMPLETE"


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Print the script of this shell.")],
) -> None:
    """Print the completion script of a shell. Bash: `leasehold completion bash >
    ~/.local/share/bash-completion/completions/leasehold`; zsh: into a folder of `$fpath` as `_leasehold`; fish: into
    ~/.config/fish/completions/leasehold.fish.
    """
    typer.echo(get_completion_script(prog_name="leasehold", complete_var=_VARIABLE, shell=shell))


def answer_shell() -> None:
    """Let typer print the completions if the completion script runs this command."""
    if _VARIABLE in os.environ:
        completion_init()
