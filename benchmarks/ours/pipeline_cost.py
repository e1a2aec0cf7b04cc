"""The probe of the whole way: CPU seconds of a job beside those of the engine alone, for the same texts."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from typing import Any

from benchmarks.ours.service import Figures, cpu_s_of, service

from embedctl import enqueue_embeddings
from embedctl.operating.local import local_worker
from embedctl.queueing.broker import Broker
from embedctl_bench.peers.adapters.embedctl_adapters.embedctl import EngineAdapter
from embedctl_bench.peers.models import measured_model, peers_folder
from embedctl_bench.texts.workloads import make_workload
from embedctl_config.settings import Settings
from embedctl_workers.machine.devices import SPIN_VARIABLE, SPINS
from embedctl_workers.models.cache import cache_folder, private_folder


def pipeline_cost(
    *, model: str = "all-MiniLM-L6-v2", workload: str = "W1", records: int = 10_000, threads: int = 1
) -> Figures:
    """CPU seconds for 1,000 texts: of a job's producer, Redis and worker, and of the engine alone, both warm."""
    os.environ.setdefault(SPIN_VARIABLE, SPINS)  # as in a worker: idle threads of the engine alone would take CPU time
    place = private_folder(peers_folder(Settings()))
    measured = measured_model(model, Settings(), place)
    load = make_workload(workload, records, measured, place)
    texts = json.loads(load.path.read_text(encoding="utf-8"))
    warming = texts[: len(texts) // 10]
    found: Figures = {}
    with service() as ours:
        settings = ours.settings.replace(hardware="cpu")
        way: dict[str, Any] = {"model": str(measured.folder), "hardware": "cpu", "settings": settings}
        options = ["--threads", str(threads)]
        log = ours.folder / "worker.log"
        with local_worker(ours.settings, hardware="cpu", model=way["model"], options=options, log_file=log):
            with closing(Broker.connect(ours.settings)) as broker, broker.connection.client() as client:
                worker = next(iter(broker.workers.alive())).pid
                pids = {"producer": os.getpid(), "Redis": int(client.info("server")["process_id"]), "worker": worker}
            enqueue_embeddings(warming, **way).wait()
            before = {name: cpu_s_of(pid) for name, pid in pids.items()}
            began = time.perf_counter()
            enqueue_embeddings(texts, **way).results()
            found["texts/s, whole"] = len(texts) / (time.perf_counter() - began)
            spent = {name: cpu_s_of(pid) - before[name] for name, pid in pids.items()}
    engine = EngineAdapter(measured.folder, threads, load.chunk, str(cache_folder(Settings())), "cpu", {})
    engine.encode(warming)
    cpu_s, began = time.process_time(), time.perf_counter()
    engine.encode(texts)
    found["texts/s, engine alone"] = len(texts) / (time.perf_counter() - began)
    spent["engine alone"] = time.process_time() - cpu_s
    found |= {f"CPU s of the {name} for 1,000 texts": each / len(texts) * 1000 for name, each in spent.items()}
    alone = spent.pop("engine alone")
    return found | {"engine alone / whole, CPU s": alone / sum(spent.values())}
