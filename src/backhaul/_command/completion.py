"""Print the script that lets a shell complete the command `backhaul`.

  source <(backhaul completion bash)     in ~/.bashrc
  source <(backhaul completion zsh)      in ~/.zshrc, after compinit
  backhaul completion fish > ~/.config/fish/completions/backhaul.fish

The scripts complete subcommands, their options, the values of options that have a fixed set, and files.
"""

from __future__ import annotations

import argparse
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from backhaul._command.output import FINE, Output


@dataclass(frozen=True, slots=True)
class CompletedParser:
    """What a shell has to know of one parser.

    Attributes:
        path: The subcommands that lead to it: ``()``, ``("certs",)``, ``("certs", "show")``.
        words: Subcommands or fixed values that may stand in the first place, with their help.
        options: Each spelling of each option, with its help.
        values: The values of an option, or ``()`` where it takes any.
    """

    path: tuple[str, ...]
    words: dict[str, str]
    options: dict[str, str]
    values: dict[str, tuple[str, ...]]


def add_arguments(parser: ArgumentParser) -> None:
    """Which shell."""
    parser.add_argument("shell", choices=sorted(_SCRIPTS), help="the shell that reads the script")


def main(given: Namespace, output: Output) -> int:
    """Print the script."""
    from backhaul._command.main import build_parser
    from backhaul._command.subcommands import SUBCOMMANDS

    print(_SCRIPTS[given.shell](list(_walk(build_parser(set(SUBCOMMANDS))))), end="")
    return FINE


def _walk(parser: ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[CompletedParser]:
    """All parsers, each before those below it."""
    words: dict[str, str] = {}
    options: dict[str, str] = {}
    values: dict[str, tuple[str, ...]] = {}
    below: dict[str, ArgumentParser] = {}
    for action in parser._actions:  # argparse has no public way to list them
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            words |= {name: (child.description or "").partition("\n")[0] for name, child in below.items()}
        elif action.option_strings:
            text = (action.help or "").replace("%(default)s", str(action.default))
            options |= dict.fromkeys(action.option_strings, text)
            if action.nargs != 0:
                choices = tuple(map(str, action.choices or ()))
                values |= dict.fromkeys(action.option_strings, choices)
        elif action.choices:
            words |= dict.fromkeys(map(str, action.choices), action.help or "")
    yield CompletedParser(path, words, options, values)
    for name, child in below.items():
        yield from _walk(child, (*path, name))


def _bash(parsers: list[CompletedParser]) -> str:
    """One ``case`` over the subcommands that were typed so far, and over the option before the word. The names of the
    variables mean nothing in zsh, unlike ``path``, ``words`` and ``options``.
    """
    lines = [
        "# Completion of backhaul for bash.",
        "_backhaul() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} typed= answers= flags= n",
        "    for ((n = 1; n < COMP_CWORD; n++)); do",
        '        case "$typed ${COMP_WORDS[n]}" in',
        f'            {_alternatives(parsers)}) typed+=" ${{COMP_WORDS[n]}}" ;;',
        "        esac",
        "    done",
        '    case "$typed $before" in',
    ]
    for each in parsers:
        for option, values in each.values.items():
            found = (
                f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(values))} -- "$word"))' if values else "COMPREPLY=()"
            )
            lines.append(f"        {shlex.quote(_joined(each.path, option))}) {found}; return ;;")
    lines += ["    esac", '    case "$typed" in']
    for each in parsers:
        found = f"answers={shlex.quote(' '.join(each.words))} flags={shlex.quote(' '.join(each.options))}"
        lines.append(f"        {shlex.quote(_joined(each.path))}) {found} ;;")
    lines += [
        "    esac",
        "    [[ $word != -* ]] || answers=$flags",
        '    COMPREPLY=($(compgen -W "$answers" -- "$word"))',
        "}",
        "complete -o default -F _backhaul backhaul",  # files, where there is no answer
    ]
    return "\n".join(lines) + "\n"


def _joined(path: tuple[str, ...], *more: str) -> str:
    return "".join(f" {part}" for part in (*path, *more))


def _alternatives(parsers: list[CompletedParser]) -> str:
    return "|".join(shlex.quote(_joined(each.path)) for each in parsers if each.path)


def _zsh(parsers: list[CompletedParser]) -> str:
    """The completion of bash, which zsh can run: the words are the same, and no second generator can differ."""
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(parsers)


def _fish(parsers: list[CompletedParser]) -> str:
    """One line for each word and option. fish reads conditions as commands."""
    lines = ["# Completion of backhaul for fish."]
    for each in parsers:
        if each.path:
            seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in each.path)
            further = [word for word in each.words if word]
            at_word = f"{seen}; and not __fish_seen_subcommand_from {' '.join(further)}" if further else seen
        else:
            seen = at_word = "__fish_use_subcommand"
        for word, text in each.words.items():
            lines.append(f"complete -c backhaul -f -n {_fish_quote(at_word)} -a {word} -d {_fish_quote(text)}")
        for option, text in each.options.items():
            form = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            if (values := each.values.get(option)) is not None:
                form += f" -x -a {_fish_quote(' '.join(values))}" if values else " -r"
            lines.append(f"complete -c backhaul -n {_fish_quote(seen)} {form} -d {_fish_quote(text)}")
    return "\n".join(lines) + "\n"


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
