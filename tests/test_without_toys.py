"""Without `visspec/toys` and the included weights, the library imports, runs, and says what is missing."""

import json
import os
import re
import shutil
import subprocess
import sys

from tests.test_layers import ROOT, sources

PRELUDE = (  # as in a folder of its own: an editable install would find what was deleted
    "import sys\n"
    "sys.meta_path = [f for f in sys.meta_path if 'editable' not in f.__module__]\n"
    "import visspec\n"
    "assert visspec.__file__.startswith(sys.argv[1]), visspec.__file__\n"
)
EVERYTHING = (
    "import importlib, pkgutil\n"
    "for module in pkgutil.walk_packages(visspec.__path__, 'visspec.'):\n"
    "    importlib.import_module(module.name)\n"
)
GENERATION = (
    "import torch\n"
    "from transformers import LlamaConfig, LlamaForCausalLM\n"
    "sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)\n"
    "model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()\n"
    "ids = torch.tensor([[5, 6, 7, 5, 6]])\n"
    "fast = visspec.accelerate(model, 'ngram')\n"
    "ours = fast.generate(input_ids=ids, max_new_tokens=12, do_sample=False)\n"
    "assert torch.equal(ours, model.generate(ids, max_new_tokens=12, do_sample=False))\n"
    "assert visspec.accelerate(model).name == 'context'\n"
    "assert not visspec.registry.table('model')\n"
    "assert visspec.registry.preset('naive', 'codes').drafter == 'image-eagle:tree=dynamic'\n"
)
COMMANDS = """
import contextlib, io, json
from visspec.cli.main import main
def say(argv):
    said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said[0]), contextlib.redirect_stderr(said[1]):
        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code
    return [code or 0, *(part.getvalue() for part in said)]
print(json.dumps([say(argv) for argv in json.loads(sys.argv[2])]))
"""
RUN = ["list"], ["doctor"], ["bench", "kernels", "--help"], ["eval", "geneval", "--help"]
REFUSED = {
    ("caption", "x.png"): r"model: got none, and no model is included .*",
    ("generate", "x"): r"model: got none, and no model is included .*",
    ("generate", "x", "--model", "painter"): (
        r"model: painter is neither a folder nor in the cache, and the hub could not be reached, expected a .*"
    ),
    ("demo",): r"world: got 'shapes', but no scenes are included without visspec\.toys\.",
}
TOY_WORDS = re.compile(r"captioner|painter|emoji|\btoys\b|rendered shapes|shape[- ]world|[\"']shapes[\"']", re.I)
MAY_NAME = {"visspec/toys", "visspec/cli/demo.py", "visspec/io/included.py"}


def test_library_without_toys(tmp_path):
    """The packages without the toys, as a wheel has them; with what was compiled of them, if it was."""
    shutil.copytree(ROOT / "visspec", tmp_path / "visspec", ignore=shutil.ignore_patterns("toys"))
    for part in ("models", "kernels", "eval"):
        weights = shutil.ignore_patterns("captioner*", "painter*", "vispec*")
        shutil.copytree(ROOT / part, tmp_path / "visspec" / part, ignore=weights)
    program, asked = PRELUDE + EVERYTHING + GENERATION + COMMANDS, json.dumps([*RUN, *REFUSED])
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path), asked],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert all(code == 0 and len(out) > 200 for code, out, _ in result[: len(RUN)]), result[: len(RUN)]
    for (command, message), (code, _, said) in zip(REFUSED.items(), result[len(RUN) :], strict=True):
        *_, line = said.splitlines()  # behind what other packages may warn of
        assert code == 2 and re.fullmatch(f"visspec: {message}", line), (command, said)


def test_only_toys_name_toys():
    """In code or in documentation of the code; `io.included` is where they are looked up."""
    result = []
    for file, _ in sources():
        where = str(file.relative_to(ROOT))
        if not any(where.startswith(own) for own in MAY_NAME):
            lines = enumerate(file.read_text().splitlines(), 1)
            result += [f"{where}:{n}: {line.strip()}" for n, line in lines if TOY_WORDS.search(line)]
    assert not result, "\n".join(result)
    assert TOY_WORDS.search('detector("shapes")') and not TOY_WORDS.search("Shapes: B rows, N nodes")
