"""`visspec tune`: predictions from measured costs and acceptance, the choice, the preset, and what it refuses."""

import json

import pytest

import visspec
from tests import tiny_images
from tests.doubles import Oracle, fast, stock
from tests.test_cli import refused
from tests.test_eagle import make
from tests.tiny import model_of, prompt, shapes
from visspec.api import ranks, tuned_preset, tuning
from visspec.api.tuning import DrafterMeasurement, MeasuredBatch
from visspec.cli import tune as command
from visspec.cli import tune_image
from visspec.cli.main import main
from visspec.loop.draft_length import expected_tokens
from visspec.models.drafting.structure import RANKS
from visspec.toys.world.render import to_image
from visspec.toys.world.scene import held_out_scenes


def simulated(
    share: float, base: float, slope: float, batches: int = 40
) -> tuple[DrafterMeasurement, DrafterMeasurement]:
    """Rounds of 1 row that goes on with probability `share`, at seconds = base + slope * length; and plain decoding."""
    import random

    draw, lengths = random.Random(1), [1, 2, 4]
    seen, plain = DrafterMeasurement("x", 1, lengths), DrafterMeasurement("none", 1, [0])
    for _ in range(batches):
        left, rounds = 60, []
        while left > 0:
            length = draw.choice(lengths)
            gained = 1
            while gained <= length and draw.random() < share:
                gained += 1
            rounds.append((length, [gained], base + slope * length))
            left -= gained
        seen.batches.append(MeasuredBatch(0.5, rounds, [[0] * 61]))
        plain.batches.append(MeasuredBatch(0.5, [(0, [1], base)] * 60, [[0] * 61]))
    return seen, plain


@pytest.mark.parametrize("share, base, slope", [(0.8, 1.0, 0.1), (0.3, 1.0, 0.5)])
def test_predictions_are_the_formula_of_the_pace(share, base, slope):
    seen, plain = simulated(share, base, slope)
    rows = tuning.predict_speed(seen, plain)
    for row, tau in zip(rows, [list(expected_tokens([share] * 4))[i] for i in (0, 1, 3)]):
        seconds = 0.5 + 60 / tau * (base + slope * row["levels"])  # but for last rounds that are cut short
        assert row["tau"] == pytest.approx(tau, rel=0.04)
        assert row["predicted_speedup"] == pytest.approx((0.5 + 60 * base) / seconds, rel=0.06)
        low, high = row["predicted_ci95"]
        assert low < row["predicted_speedup"] < high < 1.2 * low
    (self_row,) = tuning.predict_speed(plain, plain)
    assert self_row["predicted_speedup"] == 1.0 and self_row["tau"] == 1.0
    best = tuning.best([self_row, *rows], 1.02)[0]
    assert (best["levels"] > 0) == (share == 0.8)  # nothing pays where rounds cost more than they gain


def test_drafts_of_mixed_lengths_are_counted_and_outputs_stay():
    """The oracle's drafts are all right: every length gains all of it."""
    inputs, answers = prompt("llama", shapes("llama")["ragged"]), stock("llama", "ragged")
    found = tuning.observe(fast("llama", Oracle(answers)), inputs, (1, 3), 0, max_new_tokens=24, do_sample=False)
    assert found.tokens == answers and found.prefill > 0
    assert {asked for asked, *_ in found.rounds} <= {0, 1, 2, 3} and {1, 3} <= {asked for asked, *_ in found.rounds}
    assert all(gained == [asked + 1] * len(gained) and s > 0 for asked, gained, s in found.rounds[:-1])
    sampled = {"max_new_tokens": 24, "do_sample": True, "top_k": 0}
    found = tuning.observe(fast("llama", "ngram"), inputs, (1, 3), 7, **sampled)
    assert found.tokens == fast("llama", None).run(**inputs, **sampled, seed=7).state.tokens


def test_a_preset_is_read_by_accelerate_and_belongs_to_its_model(tmp_path):
    path, model = tmp_path / "p.json", model_of("llama")
    choice = {"drafter": "ngram:longest=2", "acceptance": "typical:epsilon=0.2", "levels": 3}
    tuned_preset.write_preset(path, model, choice, measured_speedup=1.5)
    made = visspec.accelerate(model, path)
    assert made.name == "ngram" and made.length_policy.levels == 3 and made.rule.traits.guarantee == "approximate"
    assert visspec.accelerate(model, str(path), levels=5).length_policy.levels == 5
    tuned_preset.write_preset(path, model, {"drafter": "none", "acceptance": "exact", "levels": 0})
    assert visspec.accelerate(model, path).drafter is None
    other = model_of("qwen2")
    with pytest.raises(ValueError, match="is made for a model with model_type 'llama', got 'qwen2'"):
        visspec.accelerate(other, path)
    path.write_text(json.dumps({"drafter": "ngram"}))
    with pytest.raises(ValueError, match="has no acceptance, expected a preset"):
        visspec.accelerate(model, path)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    home = tmp_path_factory.mktemp("images")
    for i, scene in enumerate(held_out_scenes(8)):
        to_image(scene).save(home / f"{i}.png")
    (home / "00.png").write_bytes(b"broken")
    return home


def test_a_model_and_images_are_tuned(images, tmp_path, capsys):
    record, preset = tmp_path / "t.json", tmp_path / "p.json"
    argv = f"tune --images {images} --count 2 --lengths 2 6 --batches 1 2 --passes 1".split()
    argv += ["--drafters", "vispec", "--max-new-tokens", "10", "--json", str(record), "--out", str(preset)]
    assert main([*argv, "--sweep"]) == 0
    found = json.loads(record.read_text())
    rows = found["rows"]
    assert [(r["drafter"], r["levels"], r["batch_size"]) for r in rows[:5]] == [
        ("none", 0, 1), ("vispec", 2, 1), ("vispec", 6, 1), ("vispec:width=4", 2, 1), ("vispec:width=4", 6, 1),
    ]  # fmt: skip
    assert len(rows) == 10 and all(r["identical"] == r["compared"] for r in rows)
    assert found["predicted_speedup"] > 0 and len(found["predicted_ci95"]) == 2 and "choice_over_best" in found
    read = json.loads(preset.read_text())
    assert {k: read[k] for k in tuned_preset.KEPT} == {k: found["choice"][k] for k in tuned_preset.KEPT}
    said = capsys.readouterr()
    assert "choice: " in said.out or "nothing pays" in said.out
    assert "00.png" in said.err
    assert main(["caption", str(images / "0.png"), "--drafter", str(preset), "--max-new-tokens", "4"]) == 0


def test_each_picture_is_new_to_what_is_measured_on_it(images, tmp_path, capsys, monkeypatch):
    """Also to a drafter that remembers the answers of earlier requests; what fills no batch is said."""
    seen, record = [], tmp_path / "t.json"

    def watched(call, of):
        def calling(arm, inputs, *given, **options):
            batch = inputs[1] if isinstance(inputs, tuple) else inputs
            seen.extend((of(arm), pixels.numpy().tobytes()) for pixels in batch["pixel_values"])
            return call(arm, inputs, *given, **options)

        return calling

    monkeypatch.setattr(tuning, "observe", watched(tuning.observe, lambda fast: fast))
    monkeypatch.setattr(command.CaptionArm, "__call__", watched(command.CaptionArm.__call__, lambda arm: arm.fast))
    argv = f"tune --images {images} --count 4 --lengths 2 --batches 3 --max-new-tokens 9".split()
    assert main([*argv, "--drafters", "suffix:shared=true", "--json", str(record), "--sweep"]) == 0
    assert len(seen) == len({(id(fast), picture) for fast, picture in seen}) == 2 * (2 * 6) + 2 * 6
    assert json.loads(record.read_text())["left_over"] == {"3": 2}
    assert "batches of 3 leave out 2" in " ".join(capsys.readouterr().out.split())


def test_acceptance_by_rank_is_measured_and_its_tree_is_tried(images, tmp_path, capsys):
    record, trees = tmp_path / "t.json", tmp_path / "ranks.json"
    argv = ["tune", "--images", str(images), "--count", "3", "--lengths", "3", "8", "--batches", "1", "--passes", "1"]
    argv += ["--drafters", "vispec", "--max-new-tokens", "24", "--json", str(record), "--trees", str(trees), "--sweep"]
    assert main(argv) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [r["drafter"] for r in rows[-2:]] == [f"vispec:tree={trees}"] * 2
    assert all(r["identical"] == r["compared"] for r in rows)
    found = json.loads(trees.read_text())
    assert found["drafter"] == "vispec" and found["made_for"]["model_type"] and found["reached"][0][0] > 10
    rates = found[RANKS]
    assert all(sum(row) <= 1.001 for row in rates) and rates[0][0] == max(rates[0]) > 0.3
    assert "expected one that grows trees" in refused(
        capsys, "tune", "--images", str(images), "--batches", "1", "--drafters", "ngram", "--trees", str(trees)
    )


def test_rates_are_what_became_of_the_nodes():
    """Of all rounds that reached a depth, the share that went on is the sum over ranks, with all candidates offered."""
    watched = ranks.RankMeter(make("llama", 0).shaped(tree="8-12-10"))
    model = visspec.accelerate(model_of("llama"), watched, adaptive=False, levels=3)
    for seed in range(6):
        state = model.run(**prompt("llama", ["9"], seed), max_new_tokens=40, do_sample=False).state
        if seed == 0:
            rounds = [r for r in state.trace.rounds if r.levels]
            share = sum(r.committed[0] > 1 for r in rounds) / len(rounds)
            assert sum(watched.rates[0]) == pytest.approx(share) and watched.reached[0] == [len(rounds)] * 8
    assert sum(watched.accepted[0]) > 5 and watched.reached[1][0] <= sum(watched.accepted[0])
    assert all(a <= r for rows in zip(watched.accepted, watched.reached) for a, r in zip(*rows))
    state = model.run(**prompt("llama", ["9", "14", "3"]), max_new_tokens=40, do_sample=False).state
    assert state.trace.faults == 0 and len({len(r.committed) for r in state.trace.rounds}) > 1, "rows leave"
    assert watched.rates[2][-1] in (0.0, watched.accepted[2][-1] / max(watched.reached[2][-1], 1))


def test_it_says_so_when_nothing_pays():
    record = {"choice": {}, "pays": False, "best_predicted": 0.8, "predicted_ci95": [1.0, 1.0]}
    assert command.verdict(record).startswith("nothing pays") and "a slowdown: 1.25 times" in command.verdict(record)


def test_bad_input_is_a_sentence(images, tmp_path, capsys):
    said = f"got 8 that can be read, expected 10 or more in {images}"
    assert said in refused(capsys, "tune", "--images", str(images), "--batches", "5")
    (tmp_path / "nowhere").mkdir()
    assert f"{tmp_path / 'nowhere'}" in refused(capsys, "tune", "--images", str(tmp_path / "nowhere"))
    assert "got no such file" in refused(capsys, "tune", "--images", str(tmp_path / "x.jsonl"))
    assert "drafter: got 'nothing'" in refused(capsys, "tune", "--images", str(images), "--drafters", "nothing")
    assert "is a folder, expected a file" in refused(capsys, "tune", "--images", str(images), "--out", str(tmp_path))


def test_an_image_model_is_tuned(tmp_path, capsys, monkeypatch):
    """The choice is a measured way, other prompts decide about it, and the pipeline and the bench take it."""
    monkeypatch.setattr(tune_image, "EXACT", ["jacobi:window=4/exact", "jacobi:redraw=maximal,window=4/rejection"])
    tiny_images.painter(tmp_path / "m")
    (tmp_path / "p.txt").write_text("a photo of a red ring\na photo of a blue star\n")
    file, record = tmp_path / "tuned.json", tmp_path / "r.json"
    argv = ["tune", "--model", str(tmp_path / "m"), "--prompts", str(tmp_path / "p.txt"), "--out", str(file)]
    assert main([*argv, "--count", "1", "--json", str(record)]) == 0
    found = json.loads(record.read_text())
    assert [row["name"] for row in found["rows"]] == ["plain", *tune_image.EXACT] and found["n_checked"] == 1
    best = next(row for row in found["rows"] if row["name"] == found["best"])
    pays = best["measured_speedup"] >= tune_image.PAYS
    chosen = "/".join(found["choice"][part] for part in ("drafter", "acceptance"))  # of any order, "raster" is a third
    assert found["pays"] == pays and chosen == (found["best"] if pays else tune_image.PLAIN)
    assert found["predicted"] == (best["over_plain"] if pays else 1.0)
    assert ("nothing pays" not in capsys.readouterr().out) == pays
    file.write_text(file.read_text().replace(json.dumps(found["choice"]["drafter"]), '"jacobi:window=3"'))
    pipe = visspec.ImagePipeline.from_pretrained(tmp_path / "m", tuned=file)
    assert (pipe.drafter, pipe.acceptance) == ("jacobi:window=3", found["choice"]["acceptance"])
    own = visspec.ImagePipeline.from_pretrained(tmp_path / "m", drafter="none", acceptance="coupled", tuned=file)
    assert (own.drafter, own.acceptance) == ("none", "coupled")
    bench = ["bench", "image", "--model", str(tmp_path / "m"), "--tuned", str(file), "--count", "1"]
    assert main([*bench, "--method", "naive=none/exact", "--json", str(record)]) == 0
    assert [row["name"] for row in json.loads(record.read_text())["rows"]] == ["plain", "naive", "tuned"]
    assert "expected 4 or more (--count)" in refused(capsys, *argv, "--count", "2")
