"""Online distillation: captured lessons, loss formulas, a drafter that learns, and runs that resume exactly."""

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import pydoc
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import visspec
from tests.doubles import raises_line
from tests.tiny import model_of, prompt
from tests.training_processes import pictures
from visspec import registry
from visspec.api import progress
from visspec.api.training import drafter as train_drafter
from visspec.api.training.drafter import request_of
from visspec.api.training.structure import taus
from visspec.loop.decode import open_request
from visspec.models.decoder.target import HFDecoder
from visspec.models.eagle.drafter import EagleDrafter
from visspec.train import losses
from visspec.train.capture import capture, split
from visspec.train.loop import SingleProcess, Trainer, optimisers_of
from visspec.train.options import TrainingOptions

ROWS = {"llava": ["4 i 5", "3 i 2 i 6", "9"], "qwen2_5_vl": ["4 i 5", "6 i 3 i 2"]}


def prompts(name, new=12, rows=None):
    def request(number, temperature=1.0):
        inputs = prompt(name, rows or ROWS[name], seed=number)
        return request_of(model_of(name), inputs, temperature=temperature, max_new_tokens=new, seed=100 * number)

    return request


def target_for(drafter):
    return HFDecoder(drafter.model, drafter.traits.feature_layers, embeddings=True, states=True)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_lesson_equals_forward_pass(name):
    drafter = EagleDrafter.for_model(model_of(name))
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


def test_split_lessons(tmp_path):
    drafter = EagleDrafter.for_model(model_of("llava"), image_latents=2)
    lesson = capture(target_for(drafter), visspec.Exact(), prompts("llava")(1))
    with torch.no_grad():
        whole = drafter.rollout(lesson, 2)
        for row in split(lesson, 1):
            b = next(b for b, ids in enumerate(lesson.ids) if torch.equal(ids[: row.ids.shape[1]], row.ids[0]))
            for (states, mask), (alone, own) in zip(whole, drafter.rollout(row, 2)):
                torch.testing.assert_close(states[b : b + 1][:, mask[b]], alone[:, own[0]], rtol=1e-4, atol=1e-4)


def test_short_answers():
    drafter = EagleDrafter.for_model(model_of("llava"), image_latents=2)
    lesson = capture(target_for(drafter), visspec.Exact(), prompts("llava")(1))
    lengths = [max(lesson.lengths) - 3 * (b > 0) for b in range(len(lesson.lengths))]
    with torch.no_grad():
        steps = drafter.rollout(dataclasses.replace(lesson, lengths=lengths), 3)
    for step, (_, mask) in enumerate(steps):
        assert mask.sum(dim=1).tolist() == [length - 1 - step for length in lengths]


def test_losses_are_their_formulas():
    q, p = torch.randn(5, 7), torch.randn(5, 7)
    P, Q = p.softmax(-1), q.softmax(-1)
    torch.testing.assert_close(losses.tv(q, P), (P - Q).clamp(min=0).sum(-1))
    torch.testing.assert_close(losses.soft_ce(q, P), F.cross_entropy(q, P, reduction="none"))
    torch.testing.assert_close(losses.kl(q, P), F.kl_div(q.log_softmax(-1), P, reduction="none").sum(-1))
    torch.testing.assert_close(losses.kl(p, P), torch.zeros(5))
    with torch.inference_mode():
        fixed = P.clone()
    for measure in losses.KINDS.values():  # laws of a pass of the target, one for all rows, in either precision
        row = q[0].double().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: measure(x, fixed[1].double()), row)  # noqa: B023
        torch.testing.assert_close(measure(q, fixed[:1]), measure(q, P[:1].expand(5, 7)))
        measure(q.requires_grad_(), fixed).sum().backward()
        with pytest.raises(RuntimeError, match="expand"):
            measure(q.view(5, 1, 7), fixed)
    with pytest.raises(ValueError, match="loss: got 'l3', expected one of tv, soft_ce, kl"):
        losses.of("l3")


def trainer(folder, steps=12, **options):
    drafter = EagleDrafter.for_model(model_of("llava"), seed=2)
    plan = TrainingOptions(steps=12, batch=3, rows=2, group=2, reuse=2, unroll=2, save_every=6, warm_up=0.15, **options)
    made = Trainer(target_for(drafter), drafter, visspec.Exact(), prompts("llava", 8), plan, folder, {"seed": 0})
    return drafter, made


def test_answers_shown(tmp_path, capsys, monkeypatch):
    """A group of answers takes minutes of a large target, before the first step."""
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    _, run = trainer(tmp_path / "run")
    train_drafter.train(run, resume=False)
    first, second, *others = capsys.readouterr().err.splitlines()
    count = run.plan.batches(1)
    assert re.fullmatch(rf"visspec: 0/12 steps \[00:00<\?, .* answers=1/{count}\]", first) and count > 1
    assert f"answers=2/{count}]" in second
    assert any(re.search(r"1/12 steps .* loss=\d+\.\d+, agreed=", line) for line in others)


def test_resume_is_exact(tmp_path):
    whole, run = trainer(tmp_path / "whole")
    run.run()
    _, first = trainer(tmp_path / "broken")

    class Stop(Exception): ...

    def stop(record):
        if record["step"] == 8:  # two steps behind the last save
            raise Stop

    with pytest.raises(Stop):
        first.run(stop)
    again, second = trainer(tmp_path / "broken")
    kept = EagleDrafter.from_pretrained(tmp_path / "broken", model_of("llava"))
    second.drafter.head.load_state_dict(kept.head.state_dict())
    assert second.resume() and second.step == 6
    second.run()
    for a, b in zip(whole.head.state_dict().values(), again.head.state_dict().values()):
        assert torch.equal(a, b)
    record = json.loads((tmp_path / "whole" / "provenance.json").read_text())
    assert record["training"]["step"] == 12 and record["training"]["plan"]["loss"] == "tv"


class Dying:
    """Writes half of a save's `at`-th file, or moves nothing, and nothing after: a full disk or a killed process."""

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
def test_checkpoint_is_of_one_step(tmp_path, earlier, killed):
    """Weights and optimiser of step n are all n; `earlier`: the step of a checkpoint before, 0 without one."""

    def save(run, step):
        run.step = step
        with torch.no_grad():
            for p in run.head.parameters():
                p.fill_(step)
                run.trained_by[p].state[p] = {"exp_avg": p.clone()}
        run.save()

    result = []
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
        drafter = train_drafter.fresh_or_resumed(model_of("llava"), folder, True, 2, EagleDrafter)
        again = Trainer(run.target, drafter, run.rule, run.prompts, run.plan, folder, {"seed": 0})
        assert again.resume() == (again.step > 0)
        result.append(again.step)
        for name, p in drafter.head.named_parameters():
            assert torch.equal(p, torch.full_like(p, again.step) if again.step else fresh[name])
            assert not again.step or torch.equal(again.trained_by[p].state[p]["exp_avg"], p)
        if again.step:  # what others load is that checkpoint too
            assert EagleDrafter.from_pretrained(folder, model_of("llava")).trained.unique().tolist() == [again.step]
            assert json.loads((folder / "provenance.json").read_text())["training"]["step"] == again.step
        if dying.count < at:
            break
    assert result == sorted(result) and set(result) == {earlier, 20}
    save_file({}, folder / "run" / "step-20" / "optimiser.safetensors", {"step": "7"})
    with pytest.raises(ValueError, match=r"resume: .* mixes parts of the steps \[7, 20\]"):
        again.resume()


def test_optimisers():
    """Muon is for hidden matrices: embeddings, output layers and vectors stay with AdamW."""
    module = nn.ModuleDict(
        {"embed": nn.Embedding(9, 4), "fc": nn.Linear(4, 8), "norm": nn.RMSNorm(8), "lm_head": nn.Linear(8, 9)}
    )
    muon, adamw = optimisers_of(module, TrainingOptions())
    assert muon.param_groups[0]["params"] == [module["fc"].weight]
    matrices, vectors = ([p.shape for p in group["params"]] for group in adamw.param_groups)
    assert matrices == [(9, 4), (9, 8)] and vectors == [(8,), (8,), (9,)]
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.01, 0.0]
    assert len(optimisers_of(nn.Embedding(9, 4), TrainingOptions())) == 1


def test_poisoned_target(tmp_path):
    """Updates without a finite gradient change nothing, neither weights nor moments; ten in a row end the run."""
    drafter, run = trainer(tmp_path)
    run.plan = dataclasses.replace(run.plan, steps=40)
    update, seen = run.update, []

    def poisoned(lessons):
        if run.step == 3 or run.step >= 5:
            lessons = [dataclasses.replace(lesson, features=lesson.features * torch.nan) for lesson in lessons]
        figures = update(lessons)
        moments = [m.clone() for each in run.optimisers for own in each.state.values() for m in own.values()]
        seen.append([p.detach().clone() for p in drafter.head.parameters()] + moments)
        return figures

    run.update = poisoned
    with pytest.warns(RuntimeWarning, match="the gradient of step 4 is not finite, and of 0 before it"):
        with pytest.raises(ValueError, match="loss: the gradient of step 15 is not finite, and of 9 before it"):
            run.run()
    same = [len(one) == len(two) and all(map(torch.equal, one, two)) for one, two in itertools.pairwise(seen)]
    assert same == [False, False, True, False] + [True] * 10
    assert all(math.isfinite(point["loss"]) for point in run.curve)


def test_reads_once_a_report(tmp_path, monkeypatch):
    """As on an accelerator, where a read waits for all that was started."""
    _, run = trainer(tmp_path)
    lessons = [  # on a CPU the copies are the tensors themselves
        dataclasses.replace(lesson, ids=lesson.ids.clone(), attention=lesson.attention.clone())
        for lesson in run.lessons(0)
    ]
    host = {t.untyped_storage().data_ptr() for lesson in lessons for t in (lesson.host_ids, lesson.host_attention)}
    reads = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu", "numpy"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, *a, own=own: reads.append(t) or own(t, *a))
    figures = run.update(lessons)
    assert reads and {t.untyped_storage().data_ptr() for t in reads} <= host
    reads.clear()
    run._read(figures)
    assert len(reads) == 1
    run.reads, records = 4, []
    monkeypatch.undo()
    run.run(records.append)
    assert [record["step"] for record in records] == [4, 6, 8, 12]  # a checkpoint at 6


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_the_rate_follows_its_schedule(schedule):
    plan = TrainingOptions(steps=100, warm_up=0.1, schedule=schedule, rate=2.0, floor=0.1)
    rates = [plan.rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    left = {"cosine": 0.5, "linear": 0.5, "constant": 1.0}[schedule]
    assert rates[10] == 2.0 and rates[55] == pytest.approx(0.2 + 1.8 * left)
    assert plan.rate_at(100) == pytest.approx(2.0 if schedule == "constant" else 0.2)
    for options, message in (
        ({"rate": 0.0}, "rate: got 0.0, expected a positive"),
        ({"warm_up": 20}, "warm_up: got 20, expected a share"),
        ({"schedule": "x"}, "schedule: got 'x', expected one of"),
        ({"keep": 0}, "keep: got 0, expected at least 1"),
    ):
        with raises_line(message):
            TrainingOptions(**options)


class Pair(SingleProcess):
    """Two processes of one: gradients of both are added by hand."""

    world = 2


def test_update_over_processes(tmp_path):
    """Two streams in one process, or one in each of two; the streams of both have different prompts and seeds."""
    _, whole = trainer(tmp_path / "one", accumulate=2)
    given = whole.target, whole.drafter, whole.rule, whole.prompts
    ranks = [Trainer(*given, whole.plan, tmp_path / "two", {}, None, Pair(rank)) for rank in range(2)]
    assert [list(own.streams) for own in ranks] == [[0], [1]]
    for step in (0, 1, 4):
        both, apart = whole.lessons(step), [own.lessons(step) for own in ranks]
        assert [len(lessons) for lessons in apart] == [1, 1] and not torch.equal(both[0].ids, both[1].ids)
        assert all(torch.equal(a.ids, b.ids) for a, (b,) in zip(both, apart))
    with raises_line("accumulate: got 3, expected a multiple of 2"):
        Trainer(*given, dataclasses.replace(whole.plan, accumulate=3), tmp_path, {}, None, Pair())
    plan = dataclasses.replace(whole.plan, accumulate=1)
    Trainer(*given, plan, tmp_path / "begun-by-two", {}, None, Pair()).save()
    alone = Trainer(*given, plan, tmp_path / "begun-by-two", {})
    assert list(alone.streams) == [0] and alone.resume() and list(alone.streams) == [0, 1]
    gradients = []
    for lessons in (both, both[:1], both[1:]):
        whole.head.zero_grad()
        for lesson in lessons:
            (whole.module(lesson, "tv")[0] / len(lessons)).backward()
        gradients.append({n: p.grad.clone() for n, p in whole.head.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        parts = [part.get(name, torch.zeros_like(gradient)) for part in gradients[1:]]
        torch.testing.assert_close(gradient, sum(parts) / 2, rtol=1e-4, atol=1e-6)


def test_best_checkpoint(tmp_path):
    drafter, run = trainer(tmp_path, keep=2, validate_every=3)
    taus = iter([1.0, 3.0, 2.0, 2.5])
    run.validate = lambda: {"tau_greedy": next(taus), "tau_sampled": 1.0}
    at = {}
    run.run(lambda record: at.update({record["step"]: drafter.trained.clone()}))
    assert sorted(p.name for p in (tmp_path / "run").glob("step-*")) == ["step-12", "step-6"]
    progress = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert progress["best"] == {"step": 6, "tau": 2.0} and progress["kept"] == [6, 12]
    assert torch.equal(EagleDrafter.from_pretrained(tmp_path, model_of("llava")).trained, at[6])
    again = trainer(tmp_path, keep=1, validate_every=3)[1]
    assert again.resume() and again.step == 12 and again.best["step"] == 6
    assert torch.equal(EagleDrafter.from_pretrained(tmp_path, model_of("llava")).trained, at[6])


def test_training_raises_tau(tmp_path):
    """Four prompts learned by heart: tau must clearly rise above an untrained drafter's."""
    model = model_of("llava")
    drafter = EagleDrafter.for_model(model, seed=0, levels=4)
    same = prompts("llava", 16, ["4 i 5"] * 4)
    validate = partial(taus, model, drafter, lambda temperature: [same(0, temperature)])
    before = validate()
    plan = TrainingOptions(
        steps=100, batch=4, rows=4, group=1, reuse=100, unroll=3, rate=5e-3, loss="kl", opening=1.0, warm_up=0.1
    )
    target = target_for(drafter)
    run = Trainer(target, drafter, visspec.Exact(), lambda i: same(0, 0.0), plan, tmp_path, {}, validate)
    run.run()
    after = validate()
    assert before["tau_greedy"] < 1.5 and after["tau_greedy"] > 2.5


def test_train_on_images(tmp_path, monkeypatch):
    pictures(tmp_path)
    model = model_of("llava")
    monkeypatch.setattr(train_drafter.targets, "load", lambda *a, **k: (model, None))
    monkeypatch.setattr(train_drafter, "prepare", lambda p, images, texts, m: prompt("llava", ["4 i 5"] * len(images)))
    out = tmp_path / "out"
    result = train_drafter.run("x", tmp_path, out, steps=2, rows=2, max_new_tokens=6, group=1, reuse=1, unroll=2)
    assert result[-1]["step"] == 2 and result[-1]["tau_greedy"] >= 0.9
    EagleDrafter.from_pretrained(out, model)
    assert json.loads((out / "provenance.json").read_text())["recipe"] == "train_drafter"
    options = {"steps": 2, "rows": 2, "max_new_tokens": 6, "group": 1, "reuse": 1, "unroll": 2}
    weights, target = (out / "model.safetensors").read_bytes(), registry.CHECKPOINTS / "captioner"
    other = {"data": tmp_path / "1.png", "target": "y", "dtype": 0}
    changes = {"max_new_tokens": 7, "image_latents": 2, "unroll": 3, **other}
    for name, value in changes.items():
        given = {"target": "x", "data": tmp_path, **options, name: value}
        if given.pop("dtype", None) == 0:
            monkeypatch.setattr(train_drafter.targets, "load", lambda *a, **k: (copy.deepcopy(model).double(), None))
        with pytest.raises(ValueError, match=f"resume: got {name} .*, expected .* as in {out}"):
            train_drafter.run(out=out, resume=True, **given)
    monkeypatch.setattr(train_drafter.targets, "load", None)  # refused before work
    for folder, resume, message in [
        (out, False, "already holds a drafter. Choose another folder, or pass --resume or --overwrite"),
        (target, False, "holds another model"),
        (target, True, "holds another model"),
    ]:
        with pytest.raises(ValueError, match=f"out: {folder} {message}"):
            train_drafter.run("x", tmp_path, folder, resume=resume, overwrite=folder == target, **options)
    assert (out / "model.safetensors").read_bytes() == weights
    monkeypatch.setattr(train_drafter.targets, "load", lambda *a, **k: (model, None))
    train_drafter.run("x", tmp_path, out, overwrite=True, **options | {"seed": 1})
    assert (out / "model.safetensors").read_bytes() != weights
