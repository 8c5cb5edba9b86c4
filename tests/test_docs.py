"""Every code block of README and docs runs as printed, on small models; GPU and server commands are only parsed."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import visspec
from tests import readme_table
from tests import test_convert as published
from tests import test_lantern_drafters as lantern
from tests import test_videos as videos
from tests import tiny_images as tiny
from tests.grammars import SCHEMA, json_model, json_processor
from tests.layouts import chameleon_vq_names, filled
from tests.test_bench_photos import photographs
from tests.tiny import model_of
from tests.tiny_clip import clip
from visspec import registry
from visspec.api import loading
from visspec.api.captions import prepare
from visspec.cli.main import Parser, main, parser
from visspec.entries import TABLES
from visspec.io import included
from visspec.presets import PRESETS

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
PAGES = {
    page.name: page.read_text()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
}
ELSEWHERE = "## LANTERN beside GSD"  # the rest of methods.md runs in test_bench_photos, with the record and the table
PARSED = "--device cuda|--ray|--extractor inception|visspec serve|torchrun"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="  # a PNG
SHORT = {  # what makes a command short, and says of small models what the authors' sizes do not
    "train drafter .*--prompts": "--steps 2 --rows 2 --eval-rows 2 --overwrite",
    "train drafter": "--steps 2 --rows 2 --max-new-tokens 8 --overwrite",
    "caption photos": "--max-new-tokens 8",
    "bench caption": "--max-new-tokens 8 --count 4",
    "tune": "--max-new-tokens 4 --count 4 --lengths 2 --drafters ngram",
    "convert llamagen": "--size 16 --heads 4",
    "convert (randar|mar)": "--heads 4",
}


def commands(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if re.match("visspec |make |pip |torchrun ", line)]


def test_every_line_names_what_is_there(monkeypatch):
    """Commands have their options, targets of make are in the Makefile, extras in pyproject.toml."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    optional = "the following arguments are required|expected at least one argument"  # in a sentence
    monkeypatch.setattr(
        Parser, "error", lambda self, said: re.search(optional, said) or pytest.fail(f"{page}: {line}: {said}")
    )
    for page, text in PAGES.items():
        spans = re.findall(r"`(visspec [^`]+|make [^`]+|pip [^`]+)`", BLOCK.sub("", text))
        lines = [line for kind, block in BLOCK.findall(text) if not kind for line in commands(block)]
        for line in [*lines, *(" ".join(span.split()) for span in spans)]:
            words = shlex.split(line, comments=True)
            if words[0] == "make":
                assert words[1] in targets, (page, line)
            elif words[0] == "pip":
                assert words[2] == "." or re.fullmatch(r"visspec\[(\w+)\]", words[2])[1] in extras, (page, line)
            elif len(words) > 2:
                own = words.index("visspec.cli.main") if words[0] == "torchrun" else 0
                parser().parse_args(words[own + 1 :])


def test_links_lead_somewhere():
    """Files of links, and the headings behind a #."""
    slug = lambda head: re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-")  # noqa: E731
    heads = {page: set(map(slug, re.findall(r"^#+ (.+)$", text, re.M))) for page, text in PAGES.items()}
    for page, text in PAGES.items():
        home = ROOT if page in ("README.md", "CONTRIBUTING.md") else ROOT / "docs"
        for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
            file, _, anchor = link.partition("#")
            if "://" not in link:
                assert not file or (home / file).exists(), (page, link)
                assert not anchor or anchor in heads[Path(file).name or page], (page, link)


def test_results_of_readme():
    """The table is that of docs/results.json, whose figures are those of the pages that explain them."""
    assert readme_table.with_table(PAGES["README.md"]) == PAGES["README.md"], "python -P tests/readme_table.py"
    explained = " ".join((PAGES["results.md"] + PAGES["gpu.md"]).replace("**", "").split())
    for row in json.loads((ROOT / "docs" / "results.json").read_text()):
        assert {"what", "model", "dtype", "machine", "n", "date", "commit", "command"} < set(row)
        for figure in row["figures"]:
            ratio = readme_table.figure_text({**figure, "name": ""}, figure.get("n", row["n"])).strip()
            assert re.search(rf"(?<![\d.]){re.escape(ratio)}", explained), (row["what"], ratio)


# --- what stands for the names of a page ------------------------------------------------------------------------------


def reading(home: Path) -> dict[str, Any]:
    """The published models that README names, tiny and random, as transformers saves them."""
    tiny.janus_pro(home / "deepseek-community" / "Janus-Pro-1B")
    for part in (videos.model(), videos.processor()):
        part.save_pretrained(home / "Qwen" / "Qwen2.5-VL-7B-Instruct")
    return {}


def captioning(home: Path) -> dict[str, Any]:
    """A captioner with inputs, and drafters of its own."""
    model, processor = loading.load("captioner")
    inputs = prepare(processor, included.scenes("shapes").images(1), "describe the picture in detail .", model)
    for name in ("my-drafter", "owner/name", "path/to/head"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(included.folder("vispec"), home / name)
    visspec.accelerate(model, "ngram").save_pretrained(home / "my-model")
    return {"visspec": visspec, "model": model, "processor": processor, "inputs": inputs, "prepared": [("a", inputs)]}


def serving(home: Path) -> dict[str, Any]:
    """A client of a server in this process."""
    testclient = pytest.importorskip("fastapi.testclient", reason="the extra `serve` is not installed")
    from visspec.api.server.app import Service, application
    from visspec.api.server.worker import TextWorker

    model, processor = loading.load("captioner")
    worker = TextWorker("captioner", visspec.accelerate(model), processor)
    service = Service(worker, visspec.ImagePipeline.from_pretrained("IMAGE_MODEL"), "painter")
    client = testclient.TestClient(application(service), base_url="http://127.0.0.1:8000")
    openai = importlib.import_module("openai")
    return {"openai": SimpleNamespace(OpenAI=partial(openai.OpenAI, http_client=client)), "MODEL": "captioner"}


def drafting(home: Path) -> dict[str, Any]:
    names, weights = captioning(home), llamagen(home, 1024)
    lantern.published("llamagen", home / "llamagen_drafter")
    (home / "llamagen_drafter" / "model.safetensors").unlink()
    assert main(["convert", "llamagen", *weights, "--text", "google/flan-t5-xl", "--out", "llamagen"]) == 0
    small, _ = loading.load("captioner-small")
    pipe = visspec.ImagePipeline.from_pretrained("llamagen")
    return names | {"small_model": small, "pipe": pipe, "prompt": "a red cube"}


def extending(home: Path) -> dict[str, Any]:
    return {"model": model_of("llava")}


def llamagen(home: Path, codes: int = 24, caption: bool = True, **more: bool) -> list[str]:
    weights, _, vq, *sizes = published.llamagen(home, caption, codes=codes, **more)
    return [weights, "--vq", vq, *sizes]


def evaluating(home: Path) -> None:
    """Pictures of prompts, with GenEval's metadata of them."""
    rows = included.scenes("shapes").prompts()[:8]
    photographs(home / "reference", 8)
    (home / "drawn").mkdir()
    lines = [{"image": path, **row} for path, row in zip(tiny.scene_files(home / "drawn", 8), rows)]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    clip(home / "openai" / "clip-vit-large-patch14")


def imaging(home: Path) -> dict[str, Any]:
    """Published files by their names, and pictures to be judged."""
    evaluating(home)
    llamagen(home, caption=False, queries=True)
    save_file(
        {n: w.clone() for n, w in torch.load(home / "t2i_XL.pt", weights_only=False)["model"].items()},
        home / "randar_0.7b_llamagen_360k_bs_1024_lr_0.0004.safetensors",
    )
    llamagen(home, caption=False)
    (home / "t2i_XL.pt").rename(home / "c2i_B_256.pt")
    (home / "vq_ds16_t2i.pt").rename(home / "vq_ds16_c2i.pt")
    llamagen(home)
    (home / "t2i_XL.pt").rename(home / "t2i_XL_stage1_256.pt")
    torch.save(published.var_tensors(replace(published.VAR, classes=1000)), home / "var_d16.pth")
    torch.save(filled(published.vq_names(published.TINY), 0.2), home / "vae_ch160v4096z32.pth")
    published.mar(home)
    (home / "mar.pth").rename(home / "checkpoint-last.pth")
    published.infinity(home)
    (home / "infinity_2b.pth").rename(home / "infinity_2b_reg.pth")
    (home / "vae.pth").rename(home / "infinity_vae_d32reg.pth")
    published.nextstep(home)
    (home / "nextstep").rename(home / "NextStep-1-Large")
    (home / "vae").rename(home / "NextStep-1-Large" / "vae")
    lantern.lumina(home / "Lumina-mGPT-7B-768")
    save_file(filled(chameleon_vq_names()), home / "vqgan.safetensors")
    assert main(["convert", "var", "var_d16.pth", "--vae", "vae_ch160v4096z32.pth", "--out", "var-d16"]) == 0
    return {"visspec": visspec, "processor": None, "watch": lambda pipe, step, tokens, more: more}


NAMES = {
    "README.md": reading, "captions.md": lambda home: captioning(home) | serving(home), "drafters.md": drafting,
    "extend.md": extending, "images.md": imaging,
}  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Files by the names that commands use."""
    monkeypatch.chdir(tmp_path)
    photographs(tmp_path / "photos", 8)
    (tmp_path / "FOLDER_OF_IMAGES").symlink_to(tmp_path / "photos")
    Image.new("RGB", (96, 96), "red").save(tmp_path / "photo.png")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    tiny.painter(tmp_path / "IMAGE_MODEL")
    (tmp_path / "MODEL").symlink_to(included.folder("captioner"))
    (tmp_path / "prompts.txt").write_text("a photo of a red ring\na photo of two stars\n" * 4)
    published.t5(tmp_path / "google" / "flan-t5-xl")
    monkeypatch.setitem(lantern.CONFIGS["llamagen"], "vocab_size", 1024)
    return tmp_path


def run(line: str, home: Path) -> int:
    """A command, shortened."""
    published.t5(home / "google" / "flan-t5-xl", 8 if "infinity" in line else 12)
    if "--schema" in line:  # a model whose words are those of JSON
        json_model().save_pretrained(home / "JSON")
        json_processor().save_pretrained(home / "JSON")
        line = line.replace("MODEL", "JSON")
    if " convert " in line:  # some pages convert what another block has converted
        shutil.rmtree(shlex.split(line, comments=True)[-1], ignore_errors=True)
    more = next((words for command, words in SHORT.items() if re.match(f"visspec {command}", line)), "")
    return main(shlex.split(f"{line.partition(' #')[0]} {more}")[1:])


@pytest.mark.slow
def test_readme_janus_snippet(home):
    (snippet,) = (block for kind, block in BLOCK.findall(PAGES["README.md"]) if "Janus" in block)
    names = reading(home)
    exec(snippet, names)
    assert sum(bool(line.strip()) for line in snippet.splitlines()) <= 6 and (home / "stars.png").is_file()
    plain = names["pipe"]("a photo of three stars", num_images_per_prompt=4, seed=0, preset="plain")
    assert [codes.tolist() for codes in names["out"].tokens] == [codes.tolist() for codes in plain.tokens]
    assert len({image.tobytes() for image in names["out"].images}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(PAGES[page])])
def test_a_page_runs(page, home, capsys):
    names = NAMES.get(page, lambda home: {})(home)
    try:
        for kind, block in BLOCK.findall(PAGES[page].partition(ELSEWHERE)[0]):
            if kind == "python":
                exec(block.replace("base64,...", f"base64,{PIXEL}"), names)
            for line in () if kind else commands(block):
                if line.startswith("visspec") and not re.search(PARSED, line):
                    assert run(line, home) == 0, (line, capsys.readouterr().err)
        if page == "drafters.md":  # trained here, served there
            about = json.loads((home / "served" / "config.json").read_text())["speculators_config"]
            assert about["verifier"]["name_or_path"] == str(registry.CHECKPOINTS / "captioner")
            assert registry.drafter("served", names["model"])[0].traits.levels == 15
    finally:  # what docs/extend.md registers
        TABLES["drafter"].pop("parrot", None)
        PRESETS.pop("mine", None)
        registry._added -= {("drafter", "parrot"), ("preset", "mine")}
