"""The command line: words in, one function called, an exit status out. No logic.

stdout is data, stderr is progress. A `DraftlineError` becomes one line and its exit status; anything unexpected becomes
one line and exit status 1. `--debug`, anywhere on the line, shows the traceback instead.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from draftline.errors import DraftlineError

app = typer.Typer(
    name="draftline",
    help="Train DFlash drafters for speculative decoding, and prove that what is trained is what will be served.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist or be empty.")]
TargetName = Annotated[str, typer.Option("--target", help="tiny, smollm2, a local Hugging Face folder or a hub name.")]
TargetDtype = Annotated[str, typer.Option("--target-dtype", help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that ships with the target.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Also write the result as JSON to this file.")]


def main() -> None:
    """Entry point of the `draftline` command."""
    words = sys.argv[1:]
    debug = "--debug" in words
    sys.exit(run([word for word in words if word != "--debug"], debug=debug))


def run(words: list[str], debug: bool = False) -> int:
    """Run one command and return its exit status."""
    _quiet_libraries()
    try:
        result = app(words, prog_name="draftline", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130, debug)
    except DraftlineError as error:
        return _fail(str(error), error.exit_status, debug)
    except typer.TyperException as error:
        return _fail(_usage(error), 2, debug) if str(error) else 2  # no words at all: the help was printed
    except Exception as error:  # the border of the process: nothing is above
        line = " ".join(str(error).split())
        return _fail(f"unexpected {type(error).__name__}: {line} (add --debug for the traceback)", 1, debug)
    return result if isinstance(result, int) else 0


def _usage(error: typer.TyperException) -> str:
    """What was wrong with the words, with the name of the option where the error knows it."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    return f"{' '.join(message.split())} (see draftline --help)"


def _fail(line: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"draftline: {line}", file=sys.stderr)
    return status


def _quiet_libraries() -> None:
    """Progress of ours is on stderr; that of libraries would be torn into it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _write_json(path: Path | None, value: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
