"""The bench's clock of a GPU, with stand-ins for events, graphs and the device: what is timed, and what its row says.

The stand-in device has a time of its own: a plain call takes 50 us on it, a replay 10 us, a flush 25 us.
"""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from visspec.eval.bench import clock as clocks
from visspec.eval.bench import kernels as bench
from visspec.eval.bench.kernels_jobs import KernelJob
from visspec.replay import check_waits

PLAIN, REPLAY, FLUSH = 50e-6, 10e-6, 25e-6


class Simulated(clocks.Device):
    def __init__(self, waits=(), refuses=False):
        self.now, self.log, self.waits, self.refuses = 0.0, [], waits, refuses
        super().__init__("cpu")
        self.over = SimpleNamespace(zero_=lambda: self.spend("flush", FLUSH), size=self.over.numel())

    def spend(self, what, seconds):
        self.log.append(what)
        self.now += seconds

    def call(self, name):
        return lambda index: self.spend((name, index), PLAIN)

    def record(self, call):
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        call()
        if self.log[-1][0] in self.waits:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")
        recorded = ("replay", *self.log[-1])
        return lambda: self.spend(recorded, REPLAY)

    def event(self):
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event

    def synchronize(self):
        self.log.append("wait")

    def cache_bytes(self):
        return 1000


def test_the_replay_is_timed_after_a_flush_and_nothing_else():
    clock = Simulated()
    assert clock.over.size == 2000
    (mine, how), (theirs, eager_how) = bench.time_pair(clock.call("ours"), clock.call("eager"), clock, 30, draws=4)
    assert mine == pytest.approx([REPLAY] * 30) and theirs == pytest.approx([REPLAY] * 30)
    assert how == eager_how == "events around a CUDA graph"
    measured = clock.log[clock.log.index("flush") :]
    assert measured[:4] == ["flush", ("replay", "eager", 0), "flush", ("replay", "ours", 0)]
    assert measured[4:8] == ["flush", ("replay", "ours", 1), "flush", ("replay", "eager", 1)]
    replayed = [what for what in measured if what[0] == "replay"]
    assert len(replayed) == 60 and {what[2] for what in replayed} == {0, 1, 2, 3}
    assert measured.index("wait") == 120  # nothing waits before the last repeat is queued


def test_a_call_that_waits_is_never_recorded_and_its_row_says_so():
    clock = Simulated(waits=("eager",))
    (mine, how), (theirs, eager_how) = bench.time_pair(clock.call("ours"), clock.call("eager"), clock, 30, draws=3)
    assert mine == pytest.approx([REPLAY] * 30) and theirs == pytest.approx([PLAIN] * 30)
    assert how == "events around a CUDA graph"
    assert eager_how == "events around plain calls (called a synchronizing CUDA operation)"
    assert {what[1] for what in clock.log if what[0] == "eager"} == {0, 1, 2}
    ratio, (low, high) = bench.ratio_of(mine, theirs)
    assert ratio == pytest.approx(5) and low == pytest.approx(5) and high == pytest.approx(5)


def test_a_device_that_refuses_to_record_is_timed_by_plain_calls():
    clock = Simulated(refuses=True)
    armed, how = clock.arm(clock.call("ours"))
    assert how == "events around plain calls (operation not permitted when stream is capturing)"
    assert clock.seconds([clock.start(armed, 7)]) == pytest.approx([PLAIN])
    assert clock.log[-3:] == ["flush", ("ours", 0), "wait"]


def test_a_call_that_fails_by_itself_is_no_refusal():
    def broken(index):
        raise RuntimeError("out of resources")

    with pytest.raises(RuntimeError, match="out of resources"):
        Simulated().arm(broken)


def test_host_time_begins_on_an_idle_device():
    clock = Simulated()
    times = clock.host(clock.call("ours"), 3)
    assert len(times) == 3 and min(times) >= 0
    assert clock.log == ["wait", ("ours", 0), "wait", ("ours", 1), "wait", ("ours", 2), "wait"]


def test_a_row_has_device_time_host_time_and_shares():
    clock = Simulated(waits=("eager",))
    job = KernelJob(
        "verification round", "s", "bfloat16", lambda: (clock.call("ours"), clock.call("eager")), 4000, "a loop",
        whole_round=True,
    )  # fmt: skip
    row = bench.row_description(job, torch.device("cuda", 0), 30)
    assert row["device"] == "cuda" and row["time_us"] == "not measured"
    row |= bench.measure_row(job, clock, 30, bandwidth=4e12)
    assert set(row) == {*bench.MEASURED, "kernel", "shape", "dtype", "device", "bytes", "eager", "repeats"}
    assert row["time_us"] == pytest.approx(10) and row["time_us_quartiles"] == pytest.approx([10, 10])
    assert row["eager_us"] == pytest.approx(50) and row["host_us"] >= 0 and row["eager_host_us"] >= 0
    assert row["share_of_copy_bandwidth"] == pytest.approx(4000 / 10e-6 / 4e12)
    assert row["share_of_reading_14_gb"] == pytest.approx(10e-6 / 3.5e-3)
    where = {"device": "a GPU", "date": "2026-01-02", "driver": "1.2.3", "cuda": "13", "triton": "3"}
    top = {"copy_bandwidth_gb_s": 4000.0, "provenance": where}
    said = bench.table(top | {"dispatched_ops_per_verification": 1, "host_syncs_per_round": 0, "rows": [row]})
    assert "a GPU, 2026-01-02" in said and "driver 1.2.3, CUDA 13, Triton 3" in said
    assert "0.29% of the time to read 14 GB at the measured copy bandwidth" in said
    assert "(events around a CUDA graph)" in said and "a loop (events around plain calls (called a sync" in said


def test_quick_repeats_often_enough_for_a_spread():
    assert clocks.Device.fewest >= 30 and clocks.Device.repeats >= 30


# --- the methods that touch CUDA, on a torch.cuda that only notes what it is asked ------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """The list of what torch.cuda was asked for."""
    asked = []

    def noting(name, result=None):
        return lambda *args, **options: asked.append((name, *args, *options.items())) or result

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
        "Event": noting("event", "an event"), "synchronize": noting("synchronize"),
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=50),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return asked


def test_what_is_recorded_is_replayed(asked):
    clock = clocks.Device("cpu")
    assert clock.over.numel() == 100 and clock.over.dtype == torch.uint8
    replay = clock.record(lambda: asked.append("call"))
    inside = asked[asked.index("enter capture") : asked.index("leave capture") + 1]
    assert inside == ["enter capture", "call", "leave capture"] and asked.count("call") > 1
    replay()
    assert asked[-1] == "replay"
    assert clock.event() == "an event" and asked[-1] == ("event", ("enable_timing", True))
    clock.synchronize()
    assert asked[-1] == ("synchronize", "cpu")


WAITS = {
    "read": lambda x: float(x.sum()), "asked": lambda x: bool(x.any()), "mask": lambda x: x[x > 0],
    "where": lambda x: torch.where(x > 0), "set": lambda x: x.clone().index_put_((x > 0,), x.sum()),
    "unique": torch.unique, "nonzero": torch.nonzero, "equal": lambda x: torch.equal(x, x),
    "away": lambda x: x.to("meta"), "there": lambda x: torch.empty(3, device="meta").copy_(x),
}  # fmt: skip


@pytest.mark.parametrize("what", WAITS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_waits_are_errors_while_it_is_checked_for_them(what, mode):
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


def test_the_clock_is_the_devices():
    assert isinstance(clocks.clock_of(torch.device("cpu")), clocks.ProcessorClock)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_records_and_times():
    x = torch.ones(1 << 20, device="cuda")
    clock = clocks.clock_of(torch.device("cuda"))
    (mine, how), (theirs, eager_how) = bench.time_pair(lambda i: x + 1, lambda i: float(x.sum()), clock, 30)
    assert how == "events around a CUDA graph" and eager_how.startswith("events around plain calls")
    assert min(mine) > 0 and min(theirs) > 0
