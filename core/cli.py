"""The ``tpla`` command: a table of subcommands, each imported only when it is called."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "convert": ("tpla.convert.cli:convert", "rotate and shard a checkpoint for TPLA decode"),
    "plan": ("tpla.convert.cli:plan", "choose how to shard by bytes or accuracy"),
    "eval": ("tpla.convert.eval_cli:evaluate", "measure what a converted checkpoint loses"),
    "report": ("tpla.convert.report_cli:report", "accuracy on one page, with pictures"),
    "worker": ("tpla.workers.cli:worker", "run a prefill or decode worker (SGLang + plug-in)"),
    "launch": ("tpla.workers.launch_cli:launch", "run workers and router on this host"),
    "router": ("tpla.server.cli:router", "run the HTTP endpoint and router"),
}


def main() -> None:
    """Run ``tpla COMMAND ...``."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_usage())
        return
    name = arguments[0]
    if name not in COMMANDS:
        print(f"tpla: no command {name!r}\n\n{_usage()}", file=sys.stderr)
        sys.exit(2)
    module_name, function_name = COMMANDS[name][0].split(":")
    sys.argv = [f"tpla {name}", *arguments[1:]]
    getattr(importlib.import_module(module_name), function_name)()


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "usage: tpla COMMAND [options]   (tpla COMMAND --help)\n\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
