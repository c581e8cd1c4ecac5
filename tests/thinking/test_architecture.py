"""The house keeps its rules: rooms import upwards only, thinking needs no torch, nothing hides at module level.

A rule is a function from sources (module name -> text) to its violations. It must find none in the package, and one in each small
source that breaks it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import longshift

THINKING = (
    *(
        "errors",
        "user_code",
        "terminal",
        "files",
        "background",
        "user_code",
        "yaml_reader",
        "other_tools",
        "spec",
        "cluster",
        "layout",
        "workload",
        "schedule",
        "switch",
        "program",
    ),
    *("config_parts", "train_config", "config", "config_file", "starter"),
)
DOING = ("model", "dist", "documents", "parallel", "stream", "state", "step", "weigh", "simulate", "planner", "print_result")
DOING += ("command_results", "layout_plan", "step_report", "trainer", "profile", "reports", "api")
FRONT = ("longshift", "train_command", "command_help", "cli")  # the package itself, then the command line
ROOMS = (*THINKING, *DOING, *FRONT)

NUMPY = {"numpy"}  # what a thinking room may import from outside; below, those that may import more
OUTSIDE = {"yaml_reader": {"yaml"}, "config": {"pydantic", "yaml"}}
OUTSIDE |= {"train_config": {"pydantic", "typing_extensions"}}
OUTSIDE |= {key: {"pydantic"} for key in ("config_parts", "config_file", "starter")}
OUTSIDE |= {"cluster": NUMPY | {"pydantic"}}  # profiles are files of other machines and versions
# The front door answers --help and config errors before torch is imported.
LAZY = {"longshift.api", "longshift.train_command", "longshift.cli"}
ENVIRONMENT = {"longshift.train_command", "longshift.dist.launcher", "longshift.dist.world", "longshift.dist.ranks"}
MAKERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict"}
MUTATORS = {"append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "add", "discard", "update"}
MUTATORS |= {"setdefault", "popitem"}

PLAYER = "longshift.step.player"
LAYOUT_WORDS = {"layout", "zero", "recompute", "chunk", "chunks", "pp", "tp", "dp", "ring", "ulysses", "offload", "virtual", "every"}
LAYOUT_WORDS |= {"isinstance"}  # of a runner: which kind of layout it plays

# Names that there are twice, and should not be: these may only become fewer.
TWICE_MODULES = {"files"}
TWICE_CLASSES: set[str] = set()

Sources = dict[str, str]


def read_package() -> Sources:
    root = Path(longshift.__file__).parent
    named = {}
    for path in sorted(root.rglob("*.py")):
        parts = ("longshift", *path.relative_to(root).with_suffix("").parts)
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return named


def room(module: str) -> str:
    """`layout` of `longshift.layout.box`; the package itself is a room too."""
    return module.split(".")[1] if "." in module else module


def imports(sources: Sources, module: str) -> Iterator[tuple[int, str]]:
    """(line, what is imported) of every import, wherever it stands. `from a import b` is `a.b`; of longshift only where that is a
    module, else `a`."""
    for node in ast.walk(ast.parse(sources[module])):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: write imports in full, from longshift"
            assert node.module
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, node.module if node.module.startswith("longshift") and full not in sources else full


def cycles(sources: Sources) -> Iterator[str]:
    graph = {module: {target for _, target in imports(sources, module) if target in sources} for module in sources}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "a cycle of imports: " + " -> ".join(error.args[1])


def upward_edges(sources: Sources) -> Iterator[str]:
    for module in sources:
        if room(module) not in ROOMS:
            yield f"{module}: {room(module)} is not a room of the house"
            continue
        for line, target in imports(sources, module):
            if target.split(".")[0] == "longshift" and room(target) not in ROOMS[: ROOMS.index(room(module)) + 1]:
                yield f"{module}:{line}: imports {target}, which is below it"


def foreign_thoughts(sources: Sources) -> Iterator[str]:
    for module in sources:
        if room(module) in THINKING:
            allowed = OUTSIDE.get(room(module), NUMPY) | sys.stdlib_module_names | {"longshift"}
            for line, target in imports(sources, module):
                if target.split(".")[0] not in allowed:
                    yield f"{module}:{line}: {target} in the thinking half"


def lazy_imports(sources: Sources) -> Iterator[str]:
    for module in set(sources) - LAZY:
        for function in ast.walk(ast.parse(sources[module])):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        yield f"{module}:{node.lineno}: an import inside {function.name}"


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in MAKERS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def tables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of the mutable values that a module's top level binds."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and is_mutable(node.value) and not target.id.startswith("__"):
                yield node.lineno, target.id


def mutations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) wherever a value changes in place: `X[...] = y`, `del X[...]`, `X += y`, `X.append(y)`; also of `module.X`."""

    def name(node: ast.expr) -> str | None:
        return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)

    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed = name(node.value)
        elif isinstance(node, ast.AugAssign):
            changed = name(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed = name(node.func.value)
        else:
            continue
        if changed:
            yield node.lineno, changed


def module_state(sources: Sources) -> Iterator[str]:
    """A mutable table is a constant: in capitals, and changed nowhere."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    constants = {name for tree in trees.values() for _, name in tables(tree) if name.isupper()}
    for module, tree in trees.items():
        yield from (f"{module}:{line}: {name} is mutable at module level" for line, name in tables(tree) if not name.isupper())
        yield from (f"{module}:{line}: {name} is changed" for line, name in mutations(tree) if name in constants)
        yield from (f"{module}:{node.lineno}: global" for node in ast.walk(tree) if isinstance(node, ast.Global))


def ranks_in_the_model(sources: Sources) -> Iterator[str]:
    for module in sources:
        if room(module) == "model":
            for line, target in imports(sources, module):
                if target.startswith("torch.distributed"):
                    yield f"{module}:{line}: {target}, but the model knows no rank"


def environment_reads(sources: Sources) -> Iterator[str]:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for module in set(sources) - ENVIRONMENT:
        for node in ast.walk(ast.parse(sources[module])):
            if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os":
                yield f"{module}:{node.lineno}: os.{node.attr}"
            if isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}:
                yield f"{module}:{node.lineno}: the environment imported from os"


def operations_made_elsewhere(sources: Sources) -> Iterator[str]:
    """Only `program` makes operations of a step; all others play them."""

    def maker(function: ast.expr) -> str:
        """The name of what is called, or of what a method is called on."""
        method = isinstance(function, ast.Attribute) and function.attr in ("_make", "_replace") and isinstance(function.value, ast.Name)
        name = function.value if method else function  # pyright: ignore[reportAttributeAccessIssue]
        return name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")

    for module in sources:
        if room(module) != "program":
            for node in ast.walk(ast.parse(sources[module])):
                if isinstance(node, ast.Call) and maker(node.func) in ("Op", "op"):
                    yield f"{module}:{node.lineno}: an operation is made outside longshift.program"
                if isinstance(node, ast.ImportFrom) and any(alias.name == "Op" and alias.asname for alias in node.names):
                    yield f"{module}:{node.lineno}: Op under another name"


def _called_from_the_table(tree: ast.Module) -> Iterator[ast.AST]:
    """Lambdas and methods of Player that its table names, and the methods of it that they use."""
    (player,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Player")
    methods = {node.name: node for node in player.body if isinstance(node, ast.FunctionDef)}
    named = [node for node in ast.walk(player) if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    tables_of = [node for node in named if "self.table" in map(ast.unparse, getattr(node, "targets", None) or [node.target])]
    waiting: list[ast.AST] = [value for node in tables_of if isinstance(node.value, ast.Dict) for value in node.value.values]
    seen: set[str] = set()
    while waiting:
        found = waiting.pop()
        yield found
        for node in ast.walk(found):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr in methods.keys() - seen:
                seen.add(node.attr)
                waiting.append(methods[node.attr])


def layouts_in_the_player(sources: Sources) -> Iterator[str]:
    """What an operation does depends on the operation, not on the layout: what differs between layouts is in the program."""
    if PLAYER not in sources:
        return
    for function in _called_from_the_table(ast.parse(sources[PLAYER])):
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.IfExp | ast.While):
                conditions: list[ast.expr] = [node.test]
            elif isinstance(node, ast.comprehension):
                conditions = node.ifs
            elif isinstance(node, ast.BoolOp | ast.Compare):
                conditions = [node]
            elif isinstance(node, ast.Match):
                conditions = [node.subject]
            else:
                continue
            words = {word for test in conditions for word in re.findall(r"[a-z]+", ast.unparse(test).lower())}
            if words & LAYOUT_WORDS:
                yield f"{PLAYER}:{conditions[0].lineno}: {ast.unparse(conditions[0])} asks about the layout"
                break


def _twice(names: Iterable[tuple[str, str]], known: set[str], what: str) -> Iterator[str]:
    """Names, with the modules they are of, that there are twice; of the `known` ones those that there are not."""
    where: dict[str, list[str]] = {}
    for name, module in names:
        where.setdefault(name, []).append(module)
    yield from (f"{what} {name} twice: {', '.join(of)}" for name, of in where.items() if len(of) > 1 and name not in known)
    yield from (f"{what} {name} is there once at most: take it from the exceptions" for name in known if len(where.get(name, [])) < 2)


def modules_of_one_name(sources: Sources, known: set[str] = TWICE_MODULES) -> Iterator[str]:
    """A module's last name says which it is. The package's rooms are no modules here."""
    rooms = {module.rpartition(".")[0] for module in sources}
    yield from _twice(((module.rpartition(".")[2], module) for module in sources if module not in rooms), known, "module")


def classes_of_one_name(sources: Sources, known: set[str] = TWICE_CLASSES) -> Iterator[str]:
    """One word, one thing."""
    classes = ((node.name, m) for m in sources for node in ast.walk(ast.parse(sources[m])) if isinstance(node, ast.ClassDef))
    yield from _twice(classes, known, "class")


RULES = (cycles, upward_edges, foreign_thoughts, lazy_imports, module_state, ranks_in_the_model, environment_reads)
RULES += (operations_made_elsewhere, layouts_in_the_player)
NAMES = (modules_of_one_name, classes_of_one_name)


@pytest.fixture(scope="module")
def package() -> Sources:
    sources = read_package()
    assert len(sources) > 20
    return sources


@pytest.mark.parametrize("rule", RULES + NAMES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule, package):
    assert list(rule(package)) == []


BOX, STEP = "longshift.layout.box", "longshift.step.update"
TABLE = """
class Player:
    def __init__(self, layout):
        self.runner = 1 if layout.zero else 2
        self.table: dict = {"a": lambda op: %s, "b": self._b}
    def _runner(self, layout):
        return 1 if layout.chunk else 2
    def _b(self, op):
        self._c(op)
    def _c(self, op):
        %s
"""


@pytest.mark.parametrize(
    ("rule", "sources", "message"),
    [
        (cycles, {BOX: "from longshift.layout import legal", "longshift.layout.legal": "import longshift.layout.box"}, "cycle"),
        (upward_edges, {BOX: "from longshift.step.update import train_step"}, "imports longshift.step.update, which is below it"),
        (upward_edges, {"longshift.switch.plan": "import longshift.program.step"}, "imports longshift.program.step, which is below it"),
        (upward_edges, {"longshift.program.step": "import longshift.simulate"}, "imports longshift.simulate, which is below it"),
        (upward_edges, {STEP: "from longshift.trainer import loop"}, "imports longshift.trainer, which is below it"),
        (upward_edges, {"longshift.stream.tiers": "import longshift.step"}, "imports longshift.step, which is below it"),
        (foreign_thoughts, {"longshift.program.step": "import torch"}, "torch in the thinking half"),
        (upward_edges, {STEP: "import longshift.cli"}, "imports longshift.cli"),
        (upward_edges, {STEP: "import longshift"}, "imports longshift"),
        (
            upward_edges,
            {BOX: "if 0:\n  def f():\n    from longshift import api", "longshift.api": ""},
            "box:3: imports longshift.api",
        ),
        (upward_edges, {"longshift.utils": ""}, "utils is not a room"),
        (foreign_thoughts, {BOX: "import torch.distributed as dist"}, "torch.distributed in the thinking half"),
        (foreign_thoughts, {BOX: "from safetensors.torch import load_file"}, "safetensors.torch.load_file in"),
        (foreign_thoughts, {"longshift.config": "import torch"}, "torch in"),
        (foreign_thoughts, {BOX: "import pydantic"}, "pydantic in"),
        (lazy_imports, {STEP: "class A:\n  def f(self):\n    import json"}, "update:3: an import inside f"),
        (module_state, {STEP: "cache = {}"}, "cache is mutable"),
        (module_state, {STEP: "seen: list[int] = []"}, "seen is mutable"),
        (module_state, {STEP: "import collections\nqueue = collections.deque()"}, "queue is mutable"),
        (module_state, {STEP: "SEEN = []\ndef f(x):\n  SEEN.append(x)"}, "update:3: SEEN is changed"),
        (module_state, {BOX: "SEEN = {}", STEP: "from longshift.layout.box import SEEN\nSEEN[1] = 2"}, "update:2: SEEN is changed"),
        (
            module_state,
            {BOX: "_SEEN = {1}", STEP: "from longshift.layout import box\nbox._SEEN |= {2}"},
            "update:2: _SEEN is changed",
        ),
        (module_state, {BOX: "SEEN = {}", STEP: "from longshift.layout.box import SEEN\ndel SEEN[1]"}, "update:2: SEEN is changed"),
        (module_state, {STEP: "n = 0\ndef f():\n  global n\n  n += 1"}, "update:3: global"),
        (ranks_in_the_model, {"longshift.model.decoder": "import torch.distributed as dist"}, "the model knows no rank"),
        (ranks_in_the_model, {"longshift.model.decoder": "from torch import distributed"}, "the model knows no rank"),
        (environment_reads, {STEP: "import os\nrank = os.environ['RANK']"}, "update:2: os.environ"),
        (environment_reads, {STEP: "import os\nrank = os.getenv('RANK')"}, "update:2: os.getenv"),
        (environment_reads, {STEP: "from os import environ"}, "update:1: the environment"),
        (operations_made_elsewhere, {STEP: "x = Op('norm')"}, "update:1: an operation is made"),
        (operations_made_elsewhere, {"longshift.switch.plan": "\nx = [operations.Op('norm', 1)]"}, "plan:2: an operation is made"),
        (operations_made_elsewhere, {STEP: "x = op._replace(unit=3)"}, "update:1: an operation is made"),
        (operations_made_elsewhere, {STEP: "x = Op._make(y)"}, "update:1: an operation is made"),
        (operations_made_elsewhere, {STEP: "from longshift.program.operations import Op as Do"}, "update:1: Op under another name"),
        (layouts_in_the_player, {PLAYER: TABLE % ("f(op) if self.layout.zero == 3 else 0", "pass")}, "asks about the layout"),
        (layouts_in_the_player, {PLAYER: TABLE % ("self.view.pp and f(op)", "pass")}, "asks about the layout"),
        (layouts_in_the_player, {PLAYER: TABLE % ("0", "if self._layout(op).chunk: pass")}, "asks about the layout"),
        (layouts_in_the_player, {PLAYER: TABLE % ("0", "if isinstance(self.runner, ChunkedPacks): pass")}, "asks about the layout"),
    ],
)
def test_a_broken_rule_is_seen(rule, sources, message):
    found = list(rule(sources))
    assert len(found) == 1, found
    assert message in found[0]


def test_what_the_rules_allow():
    sources = {
        "longshift.errors": "TABLE = {'a': 1}\n__all__ = ['TABLE']",
        "longshift.layout.box": "import re\nimport numpy as np\nfrom longshift.errors import TABLE\nx = TABLE['a']",
        "longshift.layout.legal": "from longshift.layout.box import x\ndef f():\n  found = []\n  found.append(x)\n  return found",
        "longshift.config": "import pydantic\nimport yaml",
        "longshift.dist.world": "import os\nimport torch\nRANK = os.environ.get('RANK')",
        "longshift.cli": "def train():\n  from longshift.dist import world",
    }
    assert [violation for rule in RULES for violation in rule(sources)] == []


def import_closure(sources: Sources, module: str) -> set[str]:
    """The modules that an import of `module` imports."""
    closure, waiting = set[str](), [module]
    while waiting:
        targets = {target for _, target in imports(sources, waiting.pop()) if target in sources}
        waiting += targets - closure
        closure |= targets
    return closure


def test_the_training_loop_needs_no_planner(package):
    """What chooses layouts is done before the loop begins."""
    closure = import_closure(package, "longshift.trainer.loop")
    assert "longshift.step.player" in closure
    assert {module for module in closure if room(module) == "planner"} == set()
    assert "longshift.planner.search" in import_closure(package, "longshift.trainer.auto_plan")


def test_thinking_and_the_front_door_leave_torch_out(package):
    modules = [module for module in package if room(module) in THINKING or module == "longshift" or module in LAZY]
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("False\n", "", 0)


def test_help_imports_nothing_that_only_commands_need():
    code = "import sys, longshift.cli; print({'numpy', 'pydantic', 'torch', 'yaml', 'longshift.api'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("set()\n", "", 0)


def test_planning_leaves_what_configs_and_screens_need_out():
    """The package imports what it offers when that is asked for."""
    code = "import sys, longshift.planner.shortlist as m, longshift as ls\nprint({'pydantic', 'rich', 'yaml'} & set(sys.modules))"
    code += "\nassert dir(ls) == ls.__all__ and all(getattr(ls, name) for name in ls.__all__) and 'pydantic' in sys.modules"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("set()\n", "", 0)
    misspelt = "trian"
    with pytest.raises(AttributeError, match=f"no attribute '{misspelt}'"):
        getattr(longshift, misspelt)


@pytest.mark.parametrize(
    ("rule", "sources", "known", "message"),
    [
        (modules_of_one_name, {BOX: "", "longshift.model.box": ""}, set(), "module box twice: longshift.layout.box, longshift.model.box"),
        (modules_of_one_name, {BOX: "", "longshift.layout": "", "longshift.model.legal": ""}, {"box"}, "module box is there once at most"),
        (classes_of_one_name, {BOX: "class Box: ...", STEP: "class Box: ..."}, set(), "class Box twice: longshift.layout.box"),
        (classes_of_one_name, {BOX: "class Box: ...", STEP: "class Other: ..."}, {"Box"}, "class Box is there once at most"),
        (classes_of_one_name, {BOX: "class Box: ..."}, {"Gone"}, "class Gone is there once at most"),
    ],
)
def test_a_name_that_is_there_twice_or_an_exception_that_is_not_is_seen(rule, sources, known, message):
    found = list(rule(sources, known))
    assert len(found) == 1, found
    assert message in found[0]
    assert list(rule({BOX: "class Box: ...", STEP: "class State: ..."}, set())) == []


def test_operations_that_are_no_questions_about_the_layout_are_allowed():
    table = TABLE % ("self._b(op) if op.visit else None", "if op.number == 0 and self.tier is not None: pass")
    assert list(layouts_in_the_player({PLAYER: table})) == []
    assert len(list(_called_from_the_table(ast.parse(table)))) == 4  # the lambda, what names _b, _b, _c


def test_what_scripts_and_tests_import_is_there():
    """What benchmarks and tests import by name from the package, and from each other, has that name: they are run by hand, or late."""
    root = Path(__file__).parents[2]
    files = {path: path.read_text() for folder in ("src", "benchmarks", "tests") for path in (root / folder).rglob("*.py")}
    missing = []
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                place = node.module.replace(".", "/")
                near = [path.parent / f"{place}.py", root / "src" / f"{place}.py", root / "benchmarks" / f"{place}.py"]
                if source := next((files[one] for one in near if one in files), None):
                    known = set(re.findall(r"\w+", source))
                    missing += [f"{path.relative_to(root)}:{node.lineno}: {a.name}" for a in node.names if a.name not in known]
    assert not missing
