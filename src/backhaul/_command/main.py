"""Reads the command line and runs one subcommand. Knows the table of subcommands and none of them."""

from __future__ import annotations

import difflib
import functools
import os
import shutil
import sys
import textwrap
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence

import backhaul
from backhaul._command.output import FAILED, INTERRUPTED, MISUSED, CommandFailure, Output
from backhaul._command.subcommands import SUBCOMMANDS

_DESCRIPTION = "Distributed autograd for PyTorch: start workers, look at them, and find out what is wrong."
_EPILOG = """
exit status: 0: all is well. 1: it failed, or something is wrong. 2: the command was used wrongly.

`backhaul NAME --help` explains a subcommand. docs/command.md shows all of them.
"""
_MAX_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, with the arguments of the process if none are given. Returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    place = next((n for n, word in enumerate(words) if not word.startswith("-")), None)
    name = "" if place is None else words[place]
    if place is not None and name in SUBCOMMANDS:
        words[place + 1 :] = SUBCOMMANDS[name].arrange(words[place + 1 :])
    parser = build_parser({name})
    if not words:
        parser.print_help(sys.stderr)
        return MISUSED
    if name and name not in SUBCOMMANDS:
        parser.error(f"there is no subcommand {name!r}{_did_you_mean([name], SUBCOMMANDS)}")
    given, unknown = parser.parse_known_args(words)
    if unknown:
        options = [option for action in given.parser._actions for option in action.option_strings]
        given.parser.error(f"it does not know {' '.join(unknown)}{_did_you_mean(unknown, options)}")
    output = Output(json=getattr(given, "json", False))
    try:
        return SUBCOMMANDS[given.subcommand].load().main(given, output)
    except CommandFailure as failure:
        output.failure(given.subcommand, str(failure))
        return failure.status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def build_parser(names: set[str]) -> ArgumentParser:
    """The parser of the command, with the options of some subcommands: each takes the import of its module."""
    parser = ArgumentParser(
        prog="backhaul",
        description=_fill(_DESCRIPTION),
        epilog=_fill(_EPILOG),
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"backhaul {backhaul.__version__}")
    children = parser.add_subparsers(
        dest="subcommand", metavar="NAME", required=True, title="subcommands", parser_class=ArgumentParser
    )
    for name, subcommand in SUBCOMMANDS.items():
        child = children.add_parser(
            name,
            help=subcommand.summary,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        if name in names:
            module = subcommand.load()
            child.description = _fill(module.__doc__ or "")
            child.set_defaults(parser=child)  # which says what is wrong with the arguments
            module.add_arguments(child)
            if subcommand.reports:
                child.add_argument("--json", action="store_true", default=SUPPRESS, help="print JSON, for programs")
    return parser


def _did_you_mean(words: Sequence[str], names: Iterable[str]) -> str:
    found = difflib.get_close_matches(words[0].partition("=")[0], list(names), n=1)
    return f"; did you mean {found[0]}?" if found else "; --help lists what there is"


def _width() -> int:
    return min(shutil.get_terminal_size().columns - 2, _MAX_WIDTH)


_Formatter = functools.partial(RawDescriptionHelpFormatter, max_help_position=28, width=_width())


def _fill(text: str) -> str:
    """Break the paragraphs of a text into lines as wide as the terminal; keep lines that begin with a space."""
    paragraphs = text.strip("\n").split("\n\n")
    return "\n\n".join(
        each if each.startswith(" ") else textwrap.fill(" ".join(each.split()), _width()) for each in paragraphs
    )
