"""`visspec demo --race`: what is shown when, from recorded seconds."""

import numpy as np
from PIL import Image, ImageSequence

from visspec.cli import race
from visspec.cli.race import Lane


def test_tokens_and_codes_appear_when_they_were_committed(tmp_path, monkeypatch):
    pieces = [(" green", "drafted"), (" ring", "bonus")]
    picture = Image.new("RGB", (race.SIDE, race.SIDE), "blue")
    lanes = [Lane("slow", [1.0, 2.0], pieces), Lane("fast", [0.5, 0.5], pieces)]
    codes = [Lane("slow", [0.5, 1.0, 1.5, 2.0], [], picture), Lane("fast", [0.5] * 4, [], picture)]
    monkeypatch.setattr(race, "captions", lambda name: lanes)
    monkeypatch.setattr(race, "pictures", lambda name, prompt: codes)
    race.write(tmp_path / "out" / "race.gif", "captioner", "painter", "a ring")
    with Image.open(tmp_path / "out" / "race.gif") as file:
        spent, at = 0, {}
        for frame in ImageSequence.Iterator(file):
            at[spent] = np.asarray(frame.convert("RGB"))[5 * race.MARGIN :]  # below the names
            spent += frame.info["duration"]
    assert spent == 2 * 1000 * (2.0 + race.WAIT)

    def ink(seconds, half):
        """Pixels that are not paper, of the left or right half, at a time."""
        frame = at[max(start for start in at if start <= 1000 * seconds)]
        half_of = frame[:, : race.WIDTH // 2] if half == "slow" else frame[:, race.WIDTH // 2 :]
        return int((half_of != 255).any(-1).sum())

    assert ink(0.2, "slow") == ink(0.2, "fast") == 0
    assert ink(0.9, "slow") == 0 < ink(0.9, "fast")
    assert 0 < ink(1.5, "slow") < ink(2.5, "slow") == ink(1.5, "fast")
    assert ink(4.7, "slow") == race.SIDE**2 // 4 and ink(4.7, "fast") == race.SIDE**2
