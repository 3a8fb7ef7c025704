"""The shape of the code, kept true: imports point down, scripts stay alike, nothing that was read is run."""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys

from tests.helpers import ROOT

MODULES = {".".join(path.relative_to(ROOT / "common").with_suffix("").parts): ast.parse(path.read_text())
           for path in sorted((ROOT / "common").rglob("*.py")) if path.stem != "__init__"}
SCRIPTS = ("train_single.py", "train_dp.py", "train_ddp.py")


def imports(tree: ast.AST) -> set[str]:
    """Modules of `common` that a module imports: "sampling", "tars.index"."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (str(node.module) + ".").startswith("common."):
            whole = str(node.module).removeprefix("common").removeprefix(".")
            names = {f"{whole}.{name.name}".removeprefix(".") for name in node.names}
            found |= names & set(MODULES) or {whole}
    return found - {""}


def test_imports_point_down() -> None:
    """No cycles: every module can be read after those it stands on."""
    done: set[str] = set()
    left = {name: imports(tree) - {name} for name, tree in MODULES.items()}
    while left:
        ready = [name for name, needed in left.items() if needed <= done]
        assert ready, f"a cycle among {sorted(left)}"
        done |= set(ready)
        left = {name: needed for name, needed in left.items() if name not in done}


def test_only_scripts_know_the_config() -> None:
    """What is below them gets values: no module takes an `args` or imports the config, but what prints the flags."""
    for name, tree in MODULES.items():
        assert "config" not in imports(tree) or name == "flag_table", name


def test_every_tool_ends_alike() -> None:
    """Quietly, where nobody reads on."""
    for path in (ROOT / "common").rglob("*.py"):
        _, main, end = path.read_text().partition('\nif __name__ == "__main__":\n')
        assert not main or end.startswith("    run_tool("), path


def test_sampling_is_arithmetic_alone() -> None:
    code = "import sys, common.sampling, common.mixing, common.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_every_module_says_what_it_is_for() -> None:
    for name, tree in MODULES.items():
        assert ast.get_docstring(tree), f"common/{name}.py has no docstring"


def test_scripts_are_short_and_alike() -> None:
    texts = [(ROOT / script).read_text().splitlines() for script in SCRIPTS]
    assert all(len(text) <= 110 for text in texts)
    for other in texts[1:]:
        changed = [line for line in difflib.ndiff(texts[0], other) if line[:2] in ("- ", "+ ")]
        assert len(changed) <= 20, "\n".join(changed)


RUNS_CODE = (r"\bpickle\.loads?\(", r"\beval\(", r"\bexec\(", r"weights_only=False", r"allow_pickle=True",
             r"shell=True")
ALLOWED = {
    ("common/access/command.py", "shell=True"),  # `pipe:` is a command of the user's, and needs --allow_pipe
    ("common/benchmarks/stages.py", "pickle.loads("),  # times what it has pickled itself a line before
}


def test_nothing_that_was_read_is_executed() -> None:
    found = set()
    for path in [*(ROOT / "common").rglob("*.py"), *(ROOT / script for script in SCRIPTS)]:
        text = re.sub(r"\.eval\(", "", path.read_text())
        name = path.relative_to(ROOT).as_posix()
        found |= {(name, match[0]) for pattern in RUNS_CODE for match in re.finditer(pattern, text)}
    assert found <= ALLOWED


def test_what_is_loaded_is_loaded_safely() -> None:
    for name, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(keyword.arg == "weights_only" for keyword in node.keywords), name
