"""The command line on real files: good input, bad input in one sentence, exit codes 0, 1 and 2."""

import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

import visspec
from tests.doubles import refused
from tests.tiny import llama
from visspec import registry
from visspec.api import loading
from visspec.api.captions import PROMPT
from visspec.cli import demo, doctor
from visspec.cli.main import COMMANDS, main
from visspec.io import included
from visspec.io.files import Journal


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    paths = []
    for i, (image, suffix) in enumerate(zip(included.scenes("shapes").images(3), ("png", "webp", "jpg"))):
        path = folder / f"scene{i}.{suffix}"
        image.save(path, quality=95)
        paths.append(str(path))
    return paths


def captions(out: Path) -> dict[str, dict]:
    return {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}


def test_captions_are_printed_and_kept(pictures, tmp_path, capsys):
    out = tmp_path / "deep" / "captions.jsonl"
    assert main(["caption", *pictures, "--slots", "2", "--out", str(out)]) == 0
    assert main(["caption", *pictures, "--slots", "2", "--stats"]) == 0
    about, result = json.loads(Path(f"{out}.about.json").read_text()), captions(out)
    assert about["guarantee"] == "exact" and about["provenance"]["torch"] and about["provenance"]["drafter"] == "vispec"
    message = capsys.readouterr().out
    for path, row in zip(pictures, included.scenes("shapes").rows):
        assert f"{path}: {result[path]['caption']}\n" in message
        words = re.findall(r"\w+|[.,]", result[path]["caption"])
        assert SequenceMatcher(None, words, row["caption"].split(), autojunk=False).ratio() > 0.85
    assert message.count("tau") == 2


def test_the_gpu_is_used_where_there_is_one(monkeypatch, tmp_path, capsys, caplog):
    """Loaders and commands without a device ask for CUDA, which fails here; a model on a CPU gets a warning."""
    there = "cuda" if torch.cuda.is_available() else "cpu"
    assert visspec.ImagePipeline.from_pretrained("painter").device.type == there
    if there == "cuda":
        return
    visspec.ImagePipeline.from_pretrained("painter-var").save_pretrained(tmp_path / "own")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for load in (loading.load, loading.load_image_model, visspec.ImagePipeline.from_pretrained):
        for where in (None,) if load is loading.load else (None, str(tmp_path / "own")):
            with pytest.raises(ValueError, match="device: got 'cuda'"):
                load(where)
    with pytest.raises(ValueError, match="device: got 'cuda'"):
        visspec.Accelerated.from_pretrained("captioner")
    for command in (["generate", "a photo of three stars"], ["bench", "kernels"]):
        assert main(command) == 2 and "device: got 'cuda'" in capsys.readouterr().err
    assert visspec.ImagePipeline.from_pretrained("painter", device="cpu").device.type == "cpu"
    visspec.accelerate(llama(), None)
    assert "on the CPU, and this machine has a GPU" in caplog.text


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("bench", "train", "eval")])
def test_help_shows_each_default_once(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    options = re.split(r"\n  (?=-)", " ".join(capsys.readouterr().out.split("options:")[1:]))
    assert all(len(re.findall(r"default\b", option)) <= 1 for option in options)
    result = {option.split()[0]: " ".join(option.split()) for option in options if option}
    if "--device" in result:
        assert result["--device"].endswith("(default: auto)")
    assert "(default: None)" not in str(result) and "(default: False)" not in str(result)


def test_caption_missing_file(pictures, tmp_path, capsys):
    files = [pictures[0], str(tmp_path / "gone.png"), pictures[1]]
    code = main(["caption", *files])
    streams = capsys.readouterr()
    assert code == 1 and "gone.png" in streams.err and len(streams.err.strip().splitlines()) == 1
    assert all((f"{path}: this" in streams.out) == (path in pictures) for path in files)


def bomb(path, side=30_000):
    """A valid PNG header of side x side pixels with next to no data."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)


BAD_IMAGES = {  # what writes each
    "text": lambda path, good: path.write_text("not an image"),
    "truncated": lambda path, good: path.write_bytes(good.read_bytes()[:400]),
    "bomb": lambda path, good: bomb(path),  # above Pillow's own bomb error too
    "large": lambda path, good: bomb(path, 10_000),
    "tga": lambda path, good: Image.new("RGB", (8, 8)).save(path, format="TGA"),
    "folder": lambda path, good: path.mkdir(),
    "pixels": lambda path, good: Image.new("RGB", (200, 200)).save(path),
    "missing": lambda path, good: None,
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_bad_images(kind, pictures, tmp_path, capsys):
    path, options = tmp_path / f"bad_{kind}.png", ["--max-pixels", "10000"] if kind == "pixels" else []
    BAD_IMAGES[kind](path, Path(pictures[0]))
    line = refused(capsys, "caption", path, *options)
    assert f"bad_{kind}" in line and len(line.splitlines()) == 1


def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_checkpoints_that_cannot_be_trusted(pictures, tmp_path, capsys):
    good = copied(registry.CHECKPOINTS / "captioner", tmp_path)
    weights = good / "model.safetensors"
    moved = tmp_path / "elsewhere.safetensors"
    weights.rename(moved)
    weights.symlink_to(moved)
    assert "inside the folder" in refused(capsys, "caption", pictures[0], "--model", good)
    weights.unlink()
    (good / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pickled" in refused(capsys, "caption", pictures[0], "--model", good)
    (good / "pytorch_model.bin").unlink()
    index = good / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert "inside the folder" in refused(capsys, "caption", pictures[0], "--model", good)
    index.unlink()
    weights.write_bytes(moved.read_bytes()[:1000])
    assert "model" in refused(capsys, "caption", pictures[0], "--model", good)


@pytest.mark.parametrize("damage", ["missing", "extra", "shape"])
def test_checkpoints_with_the_wrong_tensors(damage, pictures, tmp_path, capsys):
    import torch
    from safetensors.torch import load_file, save_file

    good = copied(registry.CHECKPOINTS / "captioner", tmp_path)
    tensors = load_file(good / "model.safetensors")
    name = next(k for k in sorted(tensors) if "lm_head" in k)
    if damage == "missing":
        del tensors[name]
    elif damage == "extra":
        tensors["surprise"] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, good / "model.safetensors", metadata={"format": "pt"})
    line = refused(capsys, "caption", pictures[0], "--model", good)
    assert ("surprise" if damage == "extra" else "lm_head") in line or "size" in line


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_caption_keeps_records(error, pictures, tmp_path, capsys, monkeypatch):
    out, add = tmp_path / "c.jsonl", Journal.add

    def adding(journal, record):
        if len(journal.done) == 2:
            raise error
        add(journal, record)

    monkeypatch.setattr(Journal, "add", adding)
    argv = ["caption", *pictures, "--out", str(out), "--max-new-tokens", "12"]
    if error is KeyboardInterrupt:
        assert main(argv) == 130 and capsys.readouterr().err == "visspec: interrupted; finished results are kept\n"
    else:
        with pytest.raises(error):
            main(argv)
    assert len(captions(out)) == 2
    assert all(row["caption"] and row["ended"] == "length" for row in captions(out).values())
    assert sorted(os.listdir(tmp_path)) == ["c.jsonl", "c.jsonl.about.json"]


def test_targets_are_tried_before_any_work(pictures, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("visspec.api.loading.load", lambda *a, **k: pytest.fail("work began"))
    file = tmp_path / "file"
    file.write_text("")
    for argv in (
        ["caption", pictures[0], "--out", file / "c.jsonl"],
        ["caption", pictures[0], "--out", tmp_path],
        ["bench", "caption", "--json", file / "c.json"],
        ["bench", "caption", "--json", "/proc/none/c.json"],
        ["generate", "x", "--grid", file / "g.png"],
        ["generate", "x", "--out", file],
        ["demo", "--out", file / "o"],
        ["report", file, "-o", tmp_path],
    ):
        option = next((a for a in argv if a in ("--json", "--grid")), "--out")
        assert refused(capsys, *argv).startswith(f"visspec: {option}: ")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(("file", "said"), [(["/a/b"], "/a/b: "), ([], "")])
def test_system_error_message(file, said, capsys, monkeypatch):
    def run():
        raise OSError(28, "No space left on device", *file)

    monkeypatch.setattr("visspec.cli.doctor.report", run)
    assert refused(capsys, "doctor") == f"visspec: {said}No space left on device"


def test_broken_pipe(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["doctor"]) == 141
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_caption_about_record(pictures, tmp_path, capsys):
    out, gone = tmp_path / "c.jsonl", str(tmp_path / "gone.png")
    argv = ["caption", pictures[0], gone, "--out", str(out), "--drafter", "ngram"]
    argv += ["--acceptance", "typical:epsilon=0.1", "--temperature", "0.5", "--top-k", "5", "--seed", "3"]
    assert main(argv) == 1
    about = json.loads(Path(f"{out}.about.json").read_text())
    assert {id: row["ended"] for id, row in captions(out).items()} == {pictures[0]: "eos", gone: None}
    assert {k: about[k] for k in ("model", "prompt", "drafter", "acceptance", "guarantee")} == {
        "model": "captioner", "prompt": PROMPT, "drafter": "ngram", "acceptance": "typical:epsilon=0.1",
        "guarantee": "approximate",
    }  # fmt: skip
    assert about["sampling"] == {
        "max_new_tokens": 128, "do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 1.0, "seed": 3
    }  # fmt: skip


def test_unreadable_file_message(tmp_path, capsys, monkeypatch):
    path = tmp_path / "locked.png"
    Image.new("RGB", (8, 8)).save(path)
    path.chmod(0)
    if os.access(path, os.R_OK):  # as root, who may read everything
        path = "/proc/self/mem"
        assert "/proc/self/mem could not be read (Input/output error)" in refused(capsys, "caption", path)
    else:
        assert "locked.png could not be read (Permission denied)" in refused(capsys, "caption", path)


def test_captioner_scope_warning(pictures, tmp_path, capsys):
    rng = np.random.default_rng(0)
    photos = []
    for i in range(2):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        coarse.resize((320, 240), Image.Resampling.BICUBIC).save(tmp_path / f"photo{i}.png")
        photos.append(str(tmp_path / f"photo{i}.png"))
    short = ["--max-new-tokens", "4"]
    assert main(["caption", pictures[0], *photos, *short]) == 0
    (message,) = capsys.readouterr().err.splitlines()
    assert "only knows rendered scenes of coloured shapes" in message and "photo0.png" in message
    assert main(["caption", *pictures, *short]) == 0  # PNG, WEBP and JPEG of its own world
    assert capsys.readouterr().err == ""
    assert main(["caption", *photos, *short, "--model", str(registry.CHECKPOINTS / "captioner")]) == 0
    assert capsys.readouterr().err == ""  # a model that was named is its namer's business


def test_demo_times_pictures(monkeypatch):
    """On flat laws, where a policy of draft lengths soon rests a drafter that is seldom right."""
    painters = {key: prompts[:1] for key, prompts in demo.PAINTERS.items() if "painter-emoji" in key}
    monkeypatch.setattr(demo, "PAINTERS", painters)
    console = Console(file=io.StringIO(), width=120)
    section = demo.draw_pictures(console)
    message = console.file.getvalue()
    *_, tau, same = (cell.strip() for cell in re.search(r"│ (painter-emoji 1 .*) │", message)[1].split("│"))
    assert same == "yes" and float(tau) > 2 and section.equal == 1
    assert "1 pictures against plain decoding" in section.summary and "1 of 1 the same picture" in section.summary
    assert all(uri.startswith("data:image/png;base64,") for uri in section.figures[0][0])


def test_doctor_on_device(monkeypatch, capsys):
    monkeypatch.setattr("visspec.io.provenance.driver_version", lambda: "570.1")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    message = "\n".join(doctor.kernel_lines(False))
    assert "kernels: torch (no CUDA device)" in message and "CUDA graphs: none without a CUDA device" in message
    assert "attend by: a mask over stored keys" in message
    first, kernels, *rest = doctor.kernel_lines(True)
    assert first.startswith("driver 570.1, CUDA ") and kernels == "kernels: Triton on CUDA capability 9.0"
    assert "draft passes of 16-bit models attend by: tree_attention, no mask" in "\n".join(rest)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert doctor.kernel_lines(True)[1] == "kernels: interpreted (TRITON_INTERPRET=1), for tests only"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H100")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 0  # without Triton a CUDA tensor is refused: no other kernel takes its place
    assert "triton is MISSING: needed" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["caption", "--help"], ["nope"]])
def test_help_is_light(argv):
    program = (
        "import sys\nfrom visspec.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'PIL', 'transformers', 'diffusers', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program, *argv], check=True, capture_output=True, timeout=100)
    assert argv != ["--version"] or done.stdout.decode() == f"visspec {visspec.__version__}\n"


def test_text_needs_no_diffusers():
    """Importing it takes ten seconds, and prints warnings of packages that it finds."""
    program = (
        "import sys, torch, visspec\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)\n"
        "fast = visspec.accelerate(LlamaForCausalLM(LlamaConfig(**sizes)).eval())\n"
        "fast.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=4)\n"
        "assert 'diffusers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True, timeout=100)
