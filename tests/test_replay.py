"""Recording of calls, on a torch.cuda that only notes what it is asked, and the check that a call waits for nothing."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from visspec.replay import check_waits, cuda_graph


@pytest.fixture
def asked(monkeypatch):
    """The list of what torch.cuda was asked for."""
    asked = []

    @contextlib.contextmanager
    def within(name):
        asked.append(f"enter {name}")
        yield
        asked.append(f"leave {name}")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: asked.append("replay"))
    fakes = {
        "Stream": lambda *a, **k: stream, "current_stream": lambda *a: stream, "stream": lambda s: within("stream"),
        "CUDAGraph": lambda *a, **k: graph, "graph": lambda g, *a, **k: within("capture"),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return asked


def test_what_is_recorded_is_replayed(asked):
    output, replay = cuda_graph(lambda: asked.append("call") or 7)
    inside = asked[asked.index("enter capture") : asked.index("leave capture") + 1]
    assert inside == ["enter capture", "call", "leave capture"] and asked.count("call") == 2 and output == 7
    replay()
    assert asked[-1] == "replay"


WAITS = {
    "read": lambda x: float(x.sum()), "asked": lambda x: bool(x.any()), "mask": lambda x: x[x > 0],
    "where": lambda x: torch.where(x > 0), "set": lambda x: x.clone().index_put_((x > 0,), x.sum()),
    "unique": torch.unique, "nonzero": torch.nonzero, "equal": lambda x: torch.equal(x, x),
    "away": lambda x: x.to("meta"), "there": lambda x: torch.empty(3, device="meta").copy_(x),
}  # fmt: skip


@pytest.mark.parametrize("what", WAITS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_waits_are_errors(what, mode):
    """In this thread: the others go on reading."""
    x, read = torch.arange(3.0), []
    with mode():
        with pytest.raises(RuntimeError, match="synchronizing"):
            check_waits(lambda: WAITS[what](x))
        WAITS[what](x)

    def calm():
        other = threading.Thread(target=lambda: read.append(float(x.sum())))
        other.start()
        other.join()
        return x[torch.tensor([0, 2, 2])].clamp(min=1) + torch.where(x > 0, x, 1.0)

    check_waits(calm)
    assert read == [3.0]
