"""Is the planned suite complete, wired together and stoppable in order?"""

from itertools import count
from pathlib import Path

import pytest

from services.chassis import config
from services.chassis.config import SERVICES
from services.local.choices import settings_of
from services.local.home import Home
from services.local.plan import (
    GIB,
    Machine,
    Options,
    ProcessPlan,
    plan_suite,
    pool_bytes,
    stop_waves,
    thread_plan,
)

KEY = "ab" * 32


def planned(tmp_path: Path, **options) -> dict[str, ProcessPlan]:
    plans = plan_suite(
        Options(model=Path("/models/m"), **options),
        Home.of(tmp_path),
        Machine(cores=2, memory_bytes=16 * GIB),
        count(20000),
        python="/usr/bin/python3",
        nats_server="/usr/bin/nats-server",
        cluster_key=KEY,
    )
    return {plan.name: plan for plan in plans}


def test_a_suite_is_nats_and_all_eight_services(tmp_path: Path) -> None:
    """Nothing of the suite is missing, and NATS comes first."""
    plans = planned(tmp_path, num_prefill=2, num_decode=3)

    assert "nats-0" == next(iter(plans))
    assert {"nats", "console", *SERVICES} == {plan.service for plan in plans.values()}
    assert ["prefill-0", "prefill-1"] == [name for name in plans if name.startswith("prefill-")]
    assert ["decode-0", "decode-1", "decode-2"] == [name for name in plans if name.startswith("decode-")]


def test_whoever_computes_has_the_same_model(tmp_path: Path) -> None:
    """Embeddings of another model, or in other numerics, would be refused by nobody and be wrong."""
    plans = planned(tmp_path, dtype="fp32")
    computing = [plans[name] for name in ("prefill-0", "decode-0", "vision-0")]

    assert 1 == len({tuple(plan.settings[name] for name in ("model", "dtype", "threads")) for plan in computing})
    assert all("OMP_WAIT_POLICY" in plan.extra for plan in computing)


def test_every_port_is_its_own(tmp_path: Path) -> None:
    """No two processes are told to listen on the same port."""
    plans = planned(tmp_path, num_prefill=2, num_decode=2).values()
    used = [address for plan in plans for address in (plan.address, plan.metrics_address) if address]

    assert len(set(used)) == len(used)


def test_addresses_lead_to_the_process_meant(tmp_path: Path) -> None:
    """Whoever calls a service is given the address that service listens on."""
    plans = planned(tmp_path)

    for plan in plans.values():
        for field, value in plan.settings.items():
            if field.endswith("_address"):
                assert plans[field.removesuffix("_address") + "-0"].settings["listen"] == value, (plan.name, field)
    assert "127.0.0.1:8000" == plans["recipe-0"].settings["public_listen"]


def test_spans_go_to_the_console_and_from_there_to_another_collector(tmp_path: Path) -> None:
    """Who looks elsewhere has both; without the console they go there straight; a chosen place of one service wins."""
    elsewhere = "http://otel:4317"
    chosen = (("decode", "otlp_endpoint", "http://mine:4317"),)
    plans = planned(tmp_path, otlp_endpoint=elsewhere, settings=chosen)
    console = plans["console"]

    assert f"http://{console.address}" == plans["recipe-0"].settings["otlp_endpoint"]
    assert "http://mine:4317" == plans["decode-0"].settings["otlp_endpoint"]
    assert (console.address, console.metrics_address, elsewhere) == console.command[-3:]
    alone = planned(tmp_path, otlp_endpoint=elsewhere, console=False)
    assert elsewhere == alone["recipe-0"].settings["otlp_endpoint"]
    assert "console" not in alone


def test_store_replicas_share_the_disk_and_keep_their_names(tmp_path: Path) -> None:
    """Each has a folder and a name of its own that outlive the ports; together they take no more than one may."""
    plans = planned(tmp_path, num_kvstore=3, kv_bytes=9 * GIB)
    stores = [plans[f"kvstore-{n}"] for n in range(3)]
    told = {plans[name].settings["kvstore_address"] for name in ("entrypoint-0", "prefill-0", "decode-0")}

    assert {",".join(f"{store.name}={store.address}" for store in stores)} == told
    assert ["kv", "kv-1", "kv-2"] == [Path(store.settings["path"]).name for store in stores]
    assert {str(3 * GIB)} == {store.settings["max_bytes"] for store in stores}
    assert not any("object_store_url" in store.settings for store in stores)


def test_store_replicas_share_an_object_store(tmp_path: Path) -> None:
    """All are told of the same one."""
    plans = planned(tmp_path, num_kvstore=2, kv_url="file:///mnt/kv")

    assert {"file:///mnt/kv"} == {plans[f"kvstore-{n}"].settings["object_store_url"] for n in range(2)}


def test_the_cluster_key_reaches_the_entrypoint_alone(tmp_path: Path) -> None:
    """A secret is told to the one service that needs it, and never on a command line."""
    plans = planned(tmp_path).values()

    assert ["entrypoint"] == [plan.service for plan in plans if KEY in plan.settings.values()]
    assert not [plan.name for plan in plans if KEY in plan.command]


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_accepts_what_it_is_told(tmp_path: Path, service: str) -> None:
    """No planned setting is unknown to its service, and none that it needs is left out."""
    plan = planned(tmp_path)[f"{service}-0"]

    settings, problems = config.check(settings_of(service), config.child_environment(service, plan.settings, base={}))

    assert [] == problems
    assert settings is not None


def test_a_chosen_setting_replaces_the_default_of_its_service_only(tmp_path: Path) -> None:
    """--set decode.kv_bytes=1 changes decode's pool and nothing else."""
    plans = planned(tmp_path, settings=(("decode", "kv_bytes", "1"),))

    assert "1" == plans["decode-0"].settings["kv_bytes"]
    assert "1" != plans["prefill-0"].settings["kv_bytes"]


def test_responses_are_kept_in_the_suite_s_own_folder(tmp_path: Path) -> None:
    """They outlive `down`, two directories share none, and another database can be chosen."""
    chosen = planned(tmp_path, settings=(("recipe", "state_url", "postgresql://db/fathom"),))

    assert f"sqlite:///{tmp_path}/.fathom/responses.sqlite3" == planned(tmp_path)["recipe-0"].settings["state_url"]
    assert "postgresql://db/fathom" == chosen["recipe-0"].settings["state_url"]


def test_callers_stop_before_those_they_call(tmp_path: Path) -> None:
    """Every process is in one wave; no service stops before one that calls it."""
    plans = tuple(planned(tmp_path, num_decode=2).values())
    waves = list(stop_waves(plans))

    assert sorted(plan.name for plan in plans) == sorted(name for wave in waves for name in wave)
    assert ["recipe-0"] == waves[0]
    assert [["kvstore-0"], ["console"], ["nats-0"]] == waves[-3:]


@pytest.mark.parametrize(
    ("cores", "num_prefill", "num_decode", "expected"),
    [(1, 1, 1, 1), (2, 1, 1, 1), (4, 1, 1, 2), (2, 2, 2, 1), (16, 2, 2, 4), (8, 1, 2, 2)],
)
def test_engines_share_the_cores_out(cores, num_prefill, num_decode, expected) -> None:
    """All engines together have no more threads than cores, unless there are more engines than cores."""
    assert expected == thread_plan(cores, num_prefill, num_decode)


def test_prefill_and_decode_have_equally_many_threads(tmp_path: Path) -> None:
    """Where the thread count shows in the bits, different counts could not share blocks."""
    plans = planned(tmp_path, num_prefill=1, num_decode=3).values()

    assert 1 == len({plan.settings["threads"] for plan in plans if plan.service in {"prefill", "decode"}})


@pytest.mark.parametrize(
    ("memory", "engines", "expected"),
    [(64 * GIB, 2, GIB), (8 * GIB, 2, GIB), (4 * GIB, 2, GIB // 2), (8 * GIB, 4, GIB // 2)],
)
def test_pools_leave_most_memory_alone(memory, engines, expected) -> None:
    """All pools together take at most a quarter of the memory."""
    assert expected == pool_bytes(memory, engines)
