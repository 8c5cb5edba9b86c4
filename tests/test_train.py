"""Online distillation: captured lessons, loss formulas, a drafter that learns, and runs that resume exactly."""

import contextlib
import copy
import dataclasses
import json
import pydoc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import visspec
from tests.tiny import model_of, prompt
from visspec.api import train_drafter, zoo
from visspec.api.train_drafter import TextValidation, request_of
from visspec.loop.decode import open_request
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle.drafter import FeatureDrafter
from visspec.train import losses
from visspec.train.capture import capture, split
from visspec.train.loop import Trainer, TrainingOptions

ROWS = {"llava": ["4 i 5", "3 i 2 i 6", "9"], "qwen2_5_vl": ["4 i 5", "6 i 3 i 2"]}


def prompts(name, new=12, rows=None):
    def request(number, temperature=1.0):
        inputs = prompt(name, rows or ROWS[name], seed=number)
        return request_of(model_of(name), inputs, temperature=temperature, max_new_tokens=new, seed=100 * number)

    return request


def target_for(drafter):
    return HFDecoder(drafter.model, drafter.traits.feature_layers, embeddings=True, states=True)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_a_lesson_is_what_one_forward_pass_says(name):
    drafter = FeatureDrafter.for_model(model_of(name))
    target = target_for(drafter)
    lesson = capture(target, visspec.Exact(), prompts(name)(3))
    length = lesson.prompt_length
    assert torch.equal(lesson.ids[:, :length], prompt(name, ROWS[name], seed=3)["input_ids"])
    with torch.inference_mode():
        state, before = open_request(target, visspec.Exact(), prompts(name)(3))
        after = target.verify(state, visspec.tree.chain_draft(state.pending, lesson.ids[:, length + 1 : -1]))
    torch.testing.assert_close(lesson.features[:, :length], before.features)
    torch.testing.assert_close(lesson.features[:, length:], after.features, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(lesson.logits, after.distribution.logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lesson.positions[..., -1], state.position.expand(lesson.positions.shape[:-1]) + 10)


def test_a_lesson_falls_into_parts_that_train_as_the_whole(tmp_path):
    drafter = FeatureDrafter.for_model(model_of("llava"), image_latents=2)
    lesson = capture(target_for(drafter), visspec.Exact(), prompts("llava")(1))
    with torch.no_grad():
        whole = drafter.rollout(lesson, 2)
        for row in split(lesson, 1):
            b = next(b for b, ids in enumerate(lesson.ids) if torch.equal(ids[: row.ids.shape[1]], row.ids[0]))
            for (states, mask, _), (alone, own, _) in zip(whole, drafter.rollout(row, 2)):
                torch.testing.assert_close(states[b : b + 1][:, mask[b]], alone[:, own[0]], rtol=1e-4, atol=1e-4)


def test_elements_behind_a_short_answer_do_not_count():
    drafter = FeatureDrafter.for_model(model_of("llava"), image_latents=2)
    lesson = capture(target_for(drafter), visspec.Exact(), prompts("llava")(1))
    lengths = [max(lesson.lengths) - 3 * (b > 0) for b in range(len(lesson.lengths))]
    with torch.no_grad():
        steps = drafter.rollout(dataclasses.replace(lesson, lengths=lengths), 3)
    for step, (_, mask, _) in enumerate(steps):
        assert mask.sum(dim=1).tolist() == [length - 1 - step for length in lengths]


def test_losses_are_their_formulas():
    q, p = torch.randn(5, 7), torch.randn(5, 7)
    P, Q = p.softmax(-1), q.softmax(-1)
    torch.testing.assert_close(losses.tv(q, p), (P - Q).clamp(min=0).sum(-1))
    torch.testing.assert_close(losses.soft_ce(q, p), F.cross_entropy(q, P, reduction="none"))
    torch.testing.assert_close(losses.kl(q, p), F.kl_div(q.log_softmax(-1), P, reduction="none").sum(-1))
    torch.testing.assert_close(losses.kl(p, p), torch.zeros(5))
    with torch.inference_mode():
        fixed = P.log()
    for measure in losses.KINDS.values():  # laws of a pass of the target, one for all rows, in either precision
        row = q[0].double().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: measure(x, fixed[1].double()), row)  # noqa: B023
        torch.testing.assert_close(measure(q, fixed[:1]), measure(q, P[:1].log().expand(5, 7)))
        measure(q.requires_grad_(), fixed).sum().backward()
        with pytest.raises(RuntimeError, match="expand"):
            measure(q.view(5, 1, 7), fixed)
    with pytest.raises(ValueError, match="loss: got 'l3', expected one of tv, soft_ce, kl"):
        losses.of("l3")


def trainer(folder, steps=12, **options):
    drafter = FeatureDrafter.for_model(model_of("llava"), seed=2)
    plan = TrainingOptions(steps=12, batch=3, rows=2, group=2, reuse=2, unroll=2, save_every=6, warm_up=2, **options)
    made = Trainer(target_for(drafter), drafter, visspec.Exact(), prompts("llava", 8), plan, folder, {"seed": 0})
    return drafter, made


@pytest.mark.parametrize("ahead", [False, True])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, ahead):
    whole, run = trainer(tmp_path / "whole", ahead=ahead)
    run.run()
    _, first = trainer(tmp_path / "broken", ahead=ahead)

    class Stop(Exception): ...

    def stop(record):
        if record["step"] == 8:  # two steps behind the last save
            raise Stop

    with pytest.raises(Stop):
        first.run(stop)
    again, second = trainer(tmp_path / "broken", ahead=ahead)
    second.drafter.head.load_state_dict(
        FeatureDrafter.from_pretrained(tmp_path / "broken", model_of("llava")).head.state_dict()
    )
    assert second.resume() and second.step == 6
    second.run()
    for a, b in zip(whole.head.state_dict().values(), again.head.state_dict().values()):
        assert torch.equal(a, b)
    record = json.loads((tmp_path / "whole" / "provenance.json").read_text())
    assert record["training"]["step"] == 12 and record["training"]["plan"]["loss"] == "tv"


def test_a_run_planned_otherwise_is_not_resumed(tmp_path):
    _, run = trainer(tmp_path)
    run.save()
    _, other = trainer(tmp_path, rate=0.5)
    with pytest.raises(ValueError, match=r"resume: got rate 0\.5, expected 0\.001"):
        other.resume()


class Dying:
    """Writes half of the `at`-th file of a save (or moves nothing), and from then on nothing: a full disk, where what
    is written later may succeed again, or a process that is `killed`.
    """

    def __init__(self, monkeypatch, at: int, killed: bool):
        self.at, self.killed, self.count = at, killed, 0
        torn = lambda path: Path(path).open("wb").write(b"torn")  # noqa: E731
        for where, half in {
            "visspec.train.loop.save_file": lambda tensors, path, *more: torn(path),
            "visspec.io.checkpoint.save_file": lambda tensors, path, *more: torn(path),
            "pathlib.Path.write_text": lambda path, text: torn(path),
            "shutil.copyfile": lambda source, path: torn(path),
            "pathlib.Path.replace": lambda path, to: None,
            "shutil.rmtree": lambda path, **options: None,
            "pathlib.Path.unlink": lambda path, **options: None,
        }.items():
            monkeypatch.setattr(where, self.once(pydoc.locate(where), half))

    def once(self, whole, half):
        def write(*given, **options):
            self.count += 1
            if self.count == self.at:
                half(*given, **options)
            if self.count == self.at or (self.killed and self.count > self.at):
                raise OSError("disk full")
            return whole(*given, **options)

        return write


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("earlier", [0, 10])
def test_a_checkpoint_is_of_one_step_wherever_saving_ends(tmp_path, earlier, killed):
    """Weights and optimiser of step n are all n; `earlier`: the step of a checkpoint before, 0 without one."""

    def save(run, step):
        run.step = step
        with torch.no_grad():
            for p in run.head.parameters():
                p.fill_(step)
                run.optimiser.state[p] = {"exp_avg": p.clone()}
        run.save()

    found = []
    for at in range(1, 40):
        folder = tmp_path / str(at)
        _, run = trainer(folder)
        if earlier:
            save(run, earlier)
        with pytest.MonkeyPatch.context() as patch:
            dying = Dying(patch, at, killed)
            with contextlib.suppress(OSError):
                save(run, 20)
        fresh = trainer(folder)[0].head.state_dict()
        drafter = train_drafter.fresh_or_resumed(model_of("llava"), folder, True, 2)
        again = Trainer(run.target, drafter, run.rule, run.prompts, run.plan, folder, {"seed": 0})
        assert again.resume() == (again.step > 0)
        found.append(again.step)
        for name, p in drafter.head.named_parameters():
            assert torch.equal(p, torch.full_like(p, again.step) if again.step else fresh[name])
            assert not again.step or torch.equal(again.optimiser.state[p]["exp_avg"], p)
        if again.step:  # what others load is that checkpoint too
            assert FeatureDrafter.from_pretrained(folder, model_of("llava")).trained.unique().tolist() == [again.step]
            assert json.loads((folder / "provenance.json").read_text())["training"]["step"] == again.step
        if dying.count < at:
            break
    assert found == sorted(found) and set(found) == {earlier, 20}
    save_file({}, folder / "run" / "step-20" / "optimiser.safetensors", {"step": "7"})
    with pytest.raises(ValueError, match=r"resume: got parts of the steps \[7, 20\]"):
        again.resume()


def test_training_raises_tau(tmp_path):
    """Four prompts learned by heart: tau must clearly rise above an untrained drafter's."""
    model = model_of("llava")
    drafter = FeatureDrafter.for_model(model, seed=0, levels=4)
    same = prompts("llava", 16, ["4 i 5"] * 4)
    validate = TextValidation(model, drafter, lambda temperature: [same(0, temperature)])
    before = validate()
    plan = TrainingOptions(
        steps=100, batch=4, rows=4, group=1, reuse=100, unroll=3, rate=5e-3, loss="kl", opening=1.0, warm_up=10
    )
    target = target_for(drafter)
    run = Trainer(target, drafter, visspec.Exact(), lambda i: same(0, 0.0), plan, tmp_path, {}, validate)
    run.run()
    after = validate()
    assert before["tau_greedy"] < 1.5 and after["tau_greedy"] > 2.5


def test_the_command_trains_on_a_folder_of_images(tmp_path, monkeypatch):
    from PIL import Image

    for i in range(3):
        Image.new("RGB", (8, 8), (60 * i, 0, 0)).save(tmp_path / f"{i}.png")
    model = model_of("llava")
    monkeypatch.setattr(train_drafter.targets, "load", lambda *a, **k: (model, None))
    monkeypatch.setattr(train_drafter, "prepare", lambda p, images, texts, m: prompt("llava", ["4 i 5"] * len(images)))
    out = tmp_path / "out"
    found = train_drafter.run("x", tmp_path, out, steps=2, rows=2, max_new_tokens=6, group=1, reuse=1, unroll=2)
    assert found[-1]["step"] == 2 and found[-1]["tau_greedy"] >= 0.9
    FeatureDrafter.from_pretrained(out, model)
    assert json.loads((out / "provenance.json").read_text())["recipe"] == "train_drafter"
    options = {"steps": 2, "rows": 2, "max_new_tokens": 6, "group": 1, "reuse": 1, "unroll": 2}
    weights, target = (out / "model.safetensors").read_bytes(), zoo.CHECKPOINTS / "captioner"
    changes = {
        "max_new_tokens": 7,
        "image_latents": 2,
        "unroll": 3,
        "data": tmp_path / "1.png",
        "target": "y",
        "dtype": 0,
    }
    for name, value in changes.items():
        given = {"target": "x", "data": tmp_path, **options, name: value}
        if given.pop("dtype", None) == 0:
            monkeypatch.setattr(train_drafter.targets, "load", lambda *a, **k: (copy.deepcopy(model).double(), None))
        with pytest.raises(ValueError, match=f"resume: got {name} .*, expected .* as in {out}"):
            train_drafter.run(out=out, resume=True, **given)
    monkeypatch.setattr(train_drafter.targets, "load", None)  # refused before work
    for folder, resume, said in [
        (out, False, "holds a drafter, expected a folder of its own or --resume or --overwrite"),
        (target, False, "holds another model"),
        (target, True, "holds another model"),
    ]:
        with pytest.raises(ValueError, match=f"out: got {folder}, which {said}"):
            train_drafter.run("x", tmp_path, folder, resume=resume, overwrite=folder == target, **options)
    assert (out / "model.safetensors").read_bytes() == weights
    monkeypatch.setattr(train_drafter.targets, "load", lambda *a, **k: (model, None))
    train_drafter.run("x", tmp_path, out, overwrite=True, **options | {"seed": 1})
    assert (out / "model.safetensors").read_bytes() != weights
