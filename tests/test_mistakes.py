"""Mistakes at the command line: each ends in one sentence that says what to do, without a traceback."""

import shlex
import sys
import time
import warnings

import pytest
from PIL import Image

import visspec
from tests.doubles import refused
from visspec.cli.main import main

MISTAKES = {
    "captoin photo.png": "got captoin, expected one such as caption",
    "lst": "expected one such as list",
    "bench sizez": "expected text, caption, image, sizes, kernels",
    "bench caption --model {}": "Pass --images of yours",
    "bench sizes --sizes gpt": "llamagen-xl",
    "bench sizes --acceptance 1.2": "got 1.2, expected a probability",
    "bench sizes --levels 0": "expected a whole number of at least 1",
    "bench sizes --sizes tiny --max-new-tokens 1": "max_new_tokens: got 1, expected at least 2",
    "bench image --methods coupled": "unknown argument --methods, expected one such as --method",
    "eval fdi a b": "expected fid, kid, clipscore, geneval",
    "train draffter": "got draffter, expected drafter",
    "caption": "image",
    "caption {}/gone.png": "gone.png",
    "caption {}/photo.png --drafterr ngram": "unknown argument --drafterr, expected one such as --drafter",
    "caption {}/photo.png --drafter ngramm": "such as ngram",
    "caption {}/photo.png --drafter ngram:nods=3": "ngram does not take 'nods', expected nodes, levels",
    "caption {}/photo.png --drafter ngram:nodes=three": "nodes: got three, expected a whole number",
    "caption {}/photo.png --drafter ngram:nodes": "got option 'nodes', expected key=value",
    "caption {}/photo.png --drafter lantern": "got 'lantern', expected a checkpoint folder, a hub id or a name",
    "caption {}/photo.png --acceptance exat": "such as exact",
    "caption {}/photo.png --acceptance typical:eps=0.1": "typical does not take 'eps', expected epsilon, delta",
    "caption {}/photo.png --acceptance exact:k=3": "exact does not take 'k', expected no option",
    "caption {}/photo.png --preset coupld": "such as coupled",
    "caption {}/photo.png --preset gumbel": "for models of codes, expected one for text",
    "caption {}/photo.png --preset {}/gone.json": "gone.json",
    "caption {}/photo.png --model captoiner": "such as captioner",
    "caption {}/photo.png --model nobody/nothing": "nobody/nothing is neither a folder",
    "caption {}/photo.png --model {}/gone": "gone",
    "caption {}/photo.png --max-new-tokens many": "--max-new-tokens: got many, expected a whole number",
    "caption {}/photo.png --temperature hot": "--temperature: got hot",
    "caption {}/photo.png --max-new-tokens 0": "--max-new-tokens: got 0, expected a whole number of at least 1",
    "caption {}/photo.png --temperature -1": "--temperature: got -1, expected 0 (greedy) or more",
    "caption {}/photo.png --top-k 5": "--top-k: got 5 at temperature 0",
    "caption {}/photo.png --top-p 0.5": "--top-p: got 0.5 at temperature 0",
    "caption {}/photo.png --temperature 1 --top-p 1.5": "--top-p: got 1.5, expected a number in (0, 1]",
    "caption {}/photo.png --acceptance typical:epsilon=-1": "epsilon",
    "caption {}/photo.png --ray": "--out: got none, expected a .jsonl or .parquet file",
    "caption {}/photo.png --ray --out x.jsonl --compare 2": "--compare: got it with --ray",
    "caption {}/photo.png --retry-failed": "--retry-failed: got it without --out",
    "caption {}/none.jsonl --out x.jsonl": "got no such file",
    "caption {}/*.gif --out x.jsonl": "got no image",
    "caption {}/empty --out x.jsonl": "holds no image",
    "caption {} --out {}": "is a folder, expected a file",
    "generate x --ray --out x --grid g.png": "--grid: got it with --ray",
    "caption {}/photo.png --dtype float8": "--dtype: got float8, expected auto, float32, bfloat16, float16",
    "caption {}/photo.png --device gpu": "device: got 'gpu'",
    "caption {}": "--out: got none, expected a .jsonl or .parquet file",
    "caption {} --out captions.txt": "--out: got captions.txt, expected a file that ends in .jsonl or .parquet",
    "caption {}/photo.png --report page.html": "--report: got it without --out",
    "caption {}/photo.png --schema {}/gone.json": "--schema: got",
    "generate": "prompt: got none, expected at least one",
    "generate ''": "prompt: got an empty prompt. Describe what to draw.",
    "generate ' ' --ray --out x": "prompt: got an empty prompt. Describe what to draw.",
    "generate x -n 0": "-n: got 0, expected a whole number of at least 1",
    "generate x -n 4 --out pic.png": "--out: got pic.png for 4 pictures, expected a folder",
    "generate x --preset copled": "such as coupled",
    "generate x --model paintr": "such as painter",
    "generate x --model {}/gone": "gone",
    "generate x --acceptance lantern:k=0": "k: got 0",
    "generate x --acceptance lantern:k=1.5": "k: got 1.5",
    "generate x --height 100": "height, width: got 100",
    "generate x --json {}": "--json: ",
    "generate x --model captioner": "'llava' does not generate images",
    "bench image --model captioner": "'llava' does not generate images",
    "bench image --model painter --prompts {}/gone.txt": "gone.txt",
    "bench image --model painter --method coupled=jacobi": "expected a preset or name=drafter/acceptance",
    "convert llamagenn {}/x.pt --out {}/out": "such as llamagen",
    "convert llamagen {}/gone.pt --vq {}/gone.pt --out {}/out": "gone.pt",
    "caption {}/photo.png --model deepseek-ai/Janus-Pro-1B": "deepseek-ai/Janus-Pro-1B is neither a folder",
    "generate x --prompts {}/gone.txt": "gone.txt",
    "generate x --retry-failed": "--retry-failed: got it without --ray",
    "generate x --out {}/photo.txt": "--out: ",
    "list drafterz": "expected one such as drafters",
    "tune": "tune: Pass --model, and --images",
    "tune --model captioner": "tune: Pass --model, and --images",
    "tune --model painter --images x --prompts y": "(for captions) or --prompts (for text or pictures)",
    "train drafter": "--out",
    "train drafter --target captioner --prompts {}/photo.txt --preset eagel --out {}/out": "such as eagle",
    "export {}/gone --form eagle --out {}/out": "gone",
    "eval fid {}/gone {}/gone": "gone",
    "report {}/gone.json": "gone.json",
    "answer {}/gone.png what --drafts captioner captioner --model captioner": "gone.png",
    "bench text": "--model",
    "serve --port 99999999": "--port: got 99999999, expected a number from 0 to 65535",
    "serve --slots 0": "--slots",
    "serve --batch-invariant --prefix-cache 9": "--prefix-cache: got it with --batch-invariant. Leave",
    "serve --host 999.1.1.1": "--host, --port: can't listen on 999.1.1.1, 8000",
    "convert lantern {}/empty --out {}/out": "checkpoint: {}/empty has no config.json",
    "tune --model captioner --prompts {}/photo.txt": "'llava' does not generate images",
    "serve --model painter": "painter draws images and writes no text. Use `visspec generate`",
    "bench text --model painter": "draws images and writes no text",
    "bench text --model captioner --prompts {}/photo.png": "expected a text in UTF-8",
    "generate x --seed 99999999999999999999": "--seed: got 99999999999999999999, expected a whole number from 0",
    "generate x --guidance-scale abc": "--guidance-scale: got abc, expected a number",
    "generate --prompts {}/photo.png": "expected a text in UTF-8",
    "generate --prompts {}/blank.jsonl": "got a line without a prompt",
}


MISSING = {  # packages of an extra that a command needs
    "caption hf:nothing --out x.jsonl": "datasets",
    "caption {}/photo.png --out x.parquet": "pyarrow",
    "caption {}/photo.png --ray --out x.jsonl": "ray",
    "generate x --ray --out x": "ray",
    "eval kid {} {}": "torch_fidelity",
    "serve": "openai",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    Image.new("RGB", (48, 48), "red").save(root / "photo.png")
    (root / "photo.txt").write_text("a photo of a red ring\n")
    (root / "blank.jsonl").write_text('{"prompt": " "}\n')
    (root / "empty").mkdir()
    return root


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_a_sentence(line, files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    start = time.perf_counter()
    message = refused(capsys, *shlex.split(line.replace("{}", str(files))))
    assert message.startswith("visspec: ") and len(message.splitlines()) == 1
    assert MISTAKES[line].replace("{}", str(files)) in message
    assert "nobody/" not in line or time.perf_counter() - start < 5  # at once: two seconds, and a busy machine


@pytest.mark.parametrize("line", MISSING)
def test_missing_package_message(line, files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setitem(sys.modules, MISSING[line], None)
    message = refused(capsys, *shlex.split(line.replace("{}", str(files))))
    assert f"{MISSING[line]} is not installed. Run pip install 'visspec[" in message


@pytest.mark.parametrize("argv", [[], ["bench"], ["train"]])
def test_bare_command_shows_help(argv, capsys):
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("usage: visspec")


@pytest.mark.parametrize("prompt,drawn", [
    (["a", "photo", "of", "a", "red", "ring"], ["a photo of a red ring"]), (["a red ring"], ["a red ring"]),
    (["a red ring", "a blue star"], ["a red ring", "a blue star"]),
])  # fmt: skip
def test_a_prompt_needs_no_quotes(prompt, drawn, folder, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["generate", *prompt, "--model", str(folder), "--preset", "plain", "--out", str(out)]
    assert main(argv) == 0
    assert [line.split(": ")[1].partition(" (")[0] for line in capsys.readouterr().out.splitlines()] == drawn
    assert len(list(out.glob("*.png"))) == len(drawn)


def test_out_may_be_one_picture(folder, tmp_path):
    for name, kind in (("pic.png", "PNG"), ("pic.jpeg", "JPEG")):
        assert main(["generate", "a red ring", "--model", str(folder), "--out", str(tmp_path / name)]) == 0
        assert Image.open(tmp_path / name).format == kind


def test_warning_format(monkeypatch, capsys):
    monkeypatch.setattr("visspec.cli.doctor.report", lambda: warnings.warn("the disk is full", stacklevel=1) or "fine")
    monkeypatch.setattr(warnings, "showwarning", warnings._showwarning_orig)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["doctor"]) == 0
    assert capsys.readouterr().err == "visspec: the disk is full\n"
    assert warnings.showwarning is warnings._showwarning_orig and visspec.__version__
