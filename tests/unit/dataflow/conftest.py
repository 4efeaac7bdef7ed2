"""A dataflow and a stream of flights that most tests begin with."""

from __future__ import annotations

import pytest

import cutwater as cw
from cutwater.api.streams.stream import Stream

FLIGHTS = "scheduled timestamp_ntz, origin string, carrier string, delay long, distance double"


@pytest.fixture
def flow() -> cw.Dataflow:
    return cw.Dataflow("delays")


@pytest.fixture
def flights(flow: cw.Dataflow) -> Stream:
    return flow.read("flights", cw.memory([], schema=FLIGHTS), event_time="scheduled", out_of_order="1h")
