"""The flags of the scripts as the README shows them. A test keeps the two equal.

    python -m common.flag_table
"""

from __future__ import annotations

import dataclasses

from common.config import TrainConfig
from common.tool import run_tool


def markdown() -> str:
    """A row for each field of the config: names, default, meaning."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(TrainConfig):
        names = ", ".join(f"`{name}`" for name in (*field.metadata["short"], f"--{field.name}"))
        default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        shown = "" if default is None or default is False else default
        choices = f" ({', '.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        lines.append(f"| {names} | {shown} | {field.metadata['help']}{choices} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_tool(lambda: print(markdown()))
