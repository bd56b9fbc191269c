"""The command line: words in, one command called, an exit status out.

stdout is data, stderr is progress. A `DraftlineError` becomes one line and its exit status; anything unexpected becomes
one line and exit status 1. `--debug`, anywhere on the line, shows the traceback instead.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from draftline.errors import DraftlineError

COMMANDS = {
    "quickstart": "quickstart",
    "prepare": "prepare",
    "inspect": "prepare",
    "plan": "plan",
    "capture": "capture",
    "train": "train",
    "audit": "audit",
    "evaluate": "evaluate",
    "generate": "evaluate",
    "export": "export",
    "import": "export",
    "verify": "verify",
    "compare": "compare",
    "report": "report",
}
"""Word -> module of `draftline.commands` that has a function of that name."""


def main() -> None:
    """Entry point of the `draftline` command."""
    words = sys.argv[1:]
    debug = "--debug" in words
    sys.exit(run([word for word in words if word != "--debug"], debug=debug))


def run(words: list[str], debug: bool = False) -> int:
    """Run one command and return its exit status."""
    _set_up_libraries()
    try:
        result = _app(words)(words or ["--help"], prog_name="draftline", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", 130, debug)
    except DraftlineError as error:
        return _fail(str(error), error.exit_status, debug)
    except typer.TyperException as error:  # of ranks that torchrun has started all read the same words
        return _fail(_usage(error) if os.environ.get("RANK", "0") == "0" else "", 2, debug)
    except Exception as error:  # the border of the process: nothing is above
        line = " ".join(str(error).split())
        return _fail(f"unexpected {type(error).__name__}: {line} (add --debug for the traceback)", 1, debug)
    if not words:  # the help was printed, and nothing done
        return 2
    return result if isinstance(result, int) else 0


def _app(words: list[str]) -> typer.Typer:
    """The command that the words begin with, or, to list them or to say what was meant, all of them."""
    from draftline.commands.options import GroupedHelp, from_words

    app = typer.Typer(
        name="draftline",
        help="Train DFlash drafters for speculative decoding, and prove that what is trained is what will be served.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(lambda: None)  # with it, a single command is still called by its name
    for name in words[:1] if words and words[0] in COMMANDS else COMMANDS:
        app.command(name, cls=GroupedHelp)(from_words(command(name)))
    return app


def command(name: str) -> Callable[[Any], int | None]:
    """The function behind a word, which takes the record of its options and may give an exit status."""
    functions = vars(import_module(f"draftline.commands.{COMMANDS[name]}"))
    found: Callable[[Any], int | None] = functions[name if name != "import" else "import_"]
    return found


def _usage(error: typer.TyperException) -> str:
    """What was wrong with the words, with the name of the option where the error knows it."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = " ".join(message.split()).replace("Value error, ", "").replace("Input should be", "it must be")
    return f"{message.partition(', unable to')[0]} (see draftline --help)"


def _fail(line: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    if line:  # else another rank says it
        print(f"draftline: {line}", file=sys.stderr)
    return status


def _set_up_libraries() -> None:
    """Before they are imported. Progress of ours is on stderr; that of libraries would be torn into it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Tables of logits come and go in each step: in pages of 4 kB, making them took as long as a fifth of the step.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    for library in ("transformers", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)


if __name__ == "__main__":
    main()
