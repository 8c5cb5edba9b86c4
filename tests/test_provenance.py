"""What a number carries: device, driver, Triton and date; None for what nobody tells, never an error."""

from datetime import date

import torch

from visspec.io import provenance as origin


def test_a_cpu_record():
    record = origin.provenance(seed=3)
    assert record["device"] == "cpu" and record["seed"] == 3 and record["torch"] == torch.__version__
    assert date.fromisoformat(record["date"]) and "driver" not in record
