"""Which workers run where, on machines that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from embedctl_config import cpu
from embedctl_config.errors import SettingsError
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass, ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.commands.up import workers_as_tuned
from embedctl_workers.machine.devices import Accelerator
from embedctl_workers.machine.discovery import CpuSet, Machine
from embedctl_workers.models.files import resolve_model
from embedctl_workers.models.tuning import Tuned, save_tuned
from embedctl_workers.supervising.plan import Plan, make_plan, with_gateway

CPU_CLASSES = {name: entry for name, entry in SHIPPED_CLASSES.items() if entry.device == "cpu"}
CLASSES = {
    **CPU_CLASSES,
    "gpu": HardwareClass(device="gpu", models=("large",)),
    "gpu-other": HardwareClass(device="gpu"),
    "trainium": HardwareClass(device="neuron"),
}
SETTINGS = Settings(classes=CLASSES)


def cpus(first: int, last: int, *, node: int | None = None, threads: int = 0) -> CpuSet:
    return CpuSet(tuple(frozenset({cpu}) for cpu in range(first, last + 1)), threads or last - first + 1, node)


def gpus(*nodes: int | None) -> list[Accelerator]:
    return [Accelerator("gpu", at, f"GPU-{at}", node=node) for at, node in enumerate(nodes)]


def neuron_cores(count: int) -> list[Accelerator]:
    return [Accelerator("neuron", at, str(at)) for at in range(count)]


LAPTOP = Machine([cpus(0, 3, node=0)])
TWO_NODES = [cpus(0, 3, node=0), cpus(4, 7, node=1)]


def workers(plan: Plan) -> list[tuple[str, str, str, int]]:
    return [(each.name, each.pinned.device, each.pinned.cpu_list, each.pinned.threads) for each in plan.workers]


def test_neuron_cores_have_a_worker_each() -> None:
    plan = make_plan(SETTINGS, Machine([cpus(0, 3)], neuron_cores=neuron_cores(2)))
    assert workers(plan) == [("trainium:0", "neuron 0", "0-1", 2), ("trainium:1", "neuron 1", "2-3", 2)]
    assert plan.workers[0].arguments[:4] == ["--class", "trainium", "--neuron-core", "0"]


def test_more_workers_than_cores_is_worth_a_note() -> None:
    plan = make_plan(SETTINGS, Machine([cpus(0, 0)], gpus=gpus(None, None)))
    assert [listed for _, _, listed, _ in workers(plan)] == ["0", "0"]
    assert plan.notes == ["2 workers share 1 physical cores, and slow each other down"]


def test_gpus_that_no_class_is_for_are_named_and_the_cpus_used() -> None:
    settings = Settings(classes=CPU_CLASSES)
    plan = make_plan(settings, Machine([cpus(0, 3)], gpus=gpus(0, 0), problems={"neuron": "neuron-ls fails"}))
    assert [each.name for each in plan.workers] == ["cpu:0-3"]
    assert plan.notes == ["neuron-ls fails", 'not used: 2 GPUs, because no hardware class has device = "gpu"']


def test_the_shipped_classes_have_a_worker_on_each_device_without_any_configuration() -> None:
    plan = make_plan(Settings(), Machine([cpus(0, 3)], gpus=gpus(0, 0)))
    assert [each.name for each in plan.workers] == ["gpu:0", "gpu:1"]
    plan = make_plan(Settings(), Machine([cpus(0, 3)], neuron_cores=neuron_cores(2)))
    assert [each.name for each in plan.workers] == ["neuron:0", "neuron:1"]


def test_auto_takes_the_class_of_the_devices_name_or_the_only_one() -> None:
    machine = Machine([cpus(0, 3)], gpus=gpus(0))
    named = make_plan(SETTINGS, machine)
    assert [each.hardware for each in named.workers] == ["gpu"]
    only = make_plan(Settings(classes={"cpu": HardwareClass(), "mine": HardwareClass(device="gpu")}), machine)
    assert [each.hardware for each in only.workers] == ["mine"]
    several = {"cpu": HardwareClass(), "a": HardwareClass(device="gpu"), "b": HardwareClass(device="gpu")}
    with pytest.raises(SettingsError, match="auto is ambiguous for a GPU here: choose one of a, b with --class"):
        make_plan(Settings(classes=several), machine)


def test_classes_that_can_t_be_served_here() -> None:
    with pytest.raises(SettingsError, match="class gpu needs a GPU, and none is found here: the driver shows none"):
        make_plan(SETTINGS, LAPTOP, classes=["gpu"])
    broken = Machine([cpus(0, 3)], problems={"gpu": "NVIDIA's driver says: no"})
    with pytest.raises(SettingsError, match="none is found here: NVIDIA's driver says: no"):
        make_plan(SETTINGS, broken, classes=["gpu"])
    with pytest.raises(SettingsError, match="gpu and gpu-other each need a GPU of their own, and there is 1 here"):
        make_plan(SETTINGS, Machine([cpus(0, 3)], gpus=gpus(0)), classes=["gpu", "gpu-other"])
    with pytest.raises(SettingsError, match="Did you mean 'cpu-int8'"):
        make_plan(SETTINGS, LAPTOP, classes=["cpu-int9"])


def test_models_are_those_asked_for_or_the_classs_or_the_setting() -> None:
    machine = Machine([cpus(0, 3)], gpus=gpus(0))
    plan = make_plan(SETTINGS, machine, classes=["gpu", "cpu"])
    assert {each.hardware: each.models for each in plan.workers} == {"gpu": ("large",), "cpu": ("all-MiniLM-L6-v2",)}
    asked = make_plan(SETTINGS, machine, classes=["gpu", "cpu"], models=["a", "b"])
    assert {each.models for each in asked.workers} == {("a", "b")}
    assert asked.workers[0].command == ("embedctl worker --class gpu --gpu GPU-0 --cpus 0-1 --model a --model b")


def test_what_was_tuned_decides_the_workers_on_a_set_that_nobody_shares() -> None:
    asked: list[tuple[str, tuple[str, ...], frozenset[int]]] = []

    def advice(hardware: str, models: Sequence[str], on: frozenset[int], accelerator: Accelerator | None) -> int:
        assert accelerator is None
        asked.append((hardware, tuple(models), on))
        return 2

    alone = make_plan(SETTINGS, LAPTOP, advice=advice)
    assert [name for name, *_ in workers(alone)] == ["cpu:0-1", "cpu:2-3"]
    assert asked == [("cpu", ("all-MiniLM-L6-v2",), frozenset({0, 1, 2, 3}))]
    shared = make_plan(SETTINGS, LAPTOP, classes=["cpu", "cpu-int8"], advice=advice)
    assert len(shared.workers) == 2


def of_gpus(hardware: str, models: Sequence[str], on: frozenset[int], accelerator: Accelerator | None) -> int:
    """Advice as from a finding for GPU 0 only."""
    return 2 if accelerator and accelerator.index == 0 else 1


def test_a_gpu_has_as_many_workers_as_were_fastest_and_they_divide_its_cpus() -> None:
    plan = make_plan(SETTINGS, Machine([cpus(0, 7)], gpus=gpus(None, None)), advice=of_gpus)
    assert workers(plan) == [
        ("gpu:0", "gpu GPU-0", "0-1", 2),
        ("gpu:0", "gpu GPU-0", "2-3", 2),
        ("gpu:1", "gpu GPU-1", "4-7", 4),
    ]
    assert plan.workers[0].command == "embedctl worker --class gpu --gpu GPU-0 --gpu-workers 2 --cpus 0-1 --model large"
    assert "--gpu-workers" not in plan.workers[2].arguments
    assert [each.pinned.sharing for each in plan.workers] == [2, 2, 1]
    assert plan.notes == []


def test_what_the_class_sets_goes_before_what_was_tuned() -> None:
    def set_to(workers: int, **of: HardwareClass) -> Settings:
        changed = {name: replace(entry, workers_per_device=workers) for name, entry in of.items()}
        return SETTINGS.replace(classes=CLASSES | changed)

    machine = Machine([cpus(0, 3)], gpus=gpus(None))
    plan = make_plan(set_to(4, gpu=CLASSES["gpu"]), machine, advice=of_gpus)
    assert [each.pinned.cpu_list for each in plan.workers] == ["0", "1", "2", "3"]
    assert len(make_plan(set_to(1, gpu=CLASSES["gpu"]), machine, advice=of_gpus).workers) == 1
    on_cpus = set_to(2, cpu=CLASSES["cpu"])
    assert [name for name, *_ in workers(make_plan(on_cpus, LAPTOP))] == ["cpu:0-1", "cpu:2-3"]
    beside = make_plan(on_cpus, Machine([cpus(0, 5)], gpus=gpus(None)), classes=["cpu", "gpu"])
    assert [name for name, *_ in workers(beside)] == ["gpu:0", "cpu:2-3", "cpu:4-5"]


def test_every_worker_has_a_port_of_its_own_for_its_metrics() -> None:
    plan = make_plan(SETTINGS.replace(metrics_address="[::1]:9100"), Machine(TWO_NODES))
    assert [dict(each.environment) for each in plan.workers] == [
        {"EMBEDCTL_METRICS_ADDRESS": "[::1]:9100"},
        {"EMBEDCTL_METRICS_ADDRESS": "[::1]:9101"},
    ]
    assert plan.workers[1].command.startswith("EMBEDCTL_METRICS_ADDRESS='[::1]:9101' embedctl worker ")
    free = make_plan(SETTINGS.replace(metrics_address="0"), Machine(TWO_NODES))
    assert [each.metrics_address for each in free.workers] == ["127.0.0.1:0", "127.0.0.1:0"]
    assert dict(make_plan(SETTINGS, LAPTOP).workers[0].environment) == {}
    with pytest.raises(SettingsError, match="metrics_address: 2 workers from port 65535 on go beyond 65535"):
        make_plan(SETTINGS.replace(metrics_address="65535"), Machine(TWO_NODES))


def test_tuning_is_found_by_model_class_and_number_of_cpus(tmp_path: Path) -> None:
    models = {}
    for name, workers_found in (("tuned", 4), ("tuned-too", 2), ("untuned", 0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(name)
        models[name] = ModelEntry(source=str(folder), pooling="mean")
        if workers_found:
            tuned = Tuned(workers=workers_found, threads=1, cpus=4, tokens_per_s=1.0)
            save_tuned(tuned, CLASSES["cpu"], resolve_model(name, models[name]).fingerprint, tmp_path / "cache")
    settings = SETTINGS.replace(models=models, cache_dir=str(tmp_path / "cache"))
    four = frozenset(range(4))
    assert workers_as_tuned(settings, "cpu", ["tuned"], four) == 4
    assert workers_as_tuned(settings, "cpu", ["tuned", "tuned-too"], four) == 2
    assert workers_as_tuned(settings, "cpu", ["tuned", "untuned"], four) == 1
    assert workers_as_tuned(settings, "cpu", ["tuned"], frozenset(range(2))) == 1
    assert workers_as_tuned(settings, "cpu-int8", ["tuned"], four) == 1
    assert workers_as_tuned(settings, "cpu", [str(tmp_path / "nowhere")], four) == 1
    # What was found for one kind of GPU is nothing for another, or for a part of it.
    a100 = Accelerator("gpu", 0, "GPU-0", "A100", memory=81920)
    fingerprint = resolve_model("tuned", models["tuned"]).fingerprint
    save_tuned(Tuned(4, 1, 4, 1.0), CLASSES["gpu"], fingerprint, tmp_path / "cache", a100)
    on = partial(workers_as_tuned, settings, "gpu", ["tuned"])
    assert on(four, a100) == on(four, replace(a100, index=1, uid="GPU-1")) == 4
    assert on(frozenset(range(2)), a100) == 1
    for other in (replace(a100, memory=40960), replace(a100, name="A10"), replace(a100, name="A100 MIG 1g.10gb")):
        assert on(four, other) == 1
    elsewhere = settings.replace(cache_dir=str(tmp_path / "empty"))
    assert workers_as_tuned(elsewhere, "cpu", ["tuned"], four) == 1


def test_a_class_that_the_cpu_has_nothing_for_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(SettingsError, match="class cpu-bf16: this CPU has nothing for bf16"):
        make_plan(SETTINGS, LAPTOP, classes=["cpu-bf16"])
    monkeypatch.setattr(cpu, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    assert [each.hardware for each in make_plan(SETTINGS, LAPTOP, classes=["cpu-bf16"]).workers] == ["cpu-bf16"]


def test_a_gateway_has_the_class_and_the_model_of_the_settings_if_a_worker_has() -> None:
    for hardware, models, variables in (
        ("auto", ["other", SETTINGS.model], f"auto EMBEDCTL_MODEL={SETTINGS.model}"),
        ("cpu-int8", ["other", "third"], "auto EMBEDCTL_MODEL=other"),
        ("cpu", ["other"], "cpu EMBEDCTL_MODEL=other"),
    ):
        settings = SETTINGS.replace(hardware=hardware)
        plan = with_gateway(make_plan(settings, LAPTOP, classes=["cpu"], models=models), settings)
        assert plan.gateway is not None
        assert plan.gateway.address == "127.0.0.1:8080"
        assert str(plan).endswith(f"  EMBEDCTL_HARDWARE={variables} embedctl gateway")
