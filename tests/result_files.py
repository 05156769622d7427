"""Result files made by tests, for what reads them."""

from benchmarks import common, decode_ladder

GPU = "Fake GPU 9000"


def pretend_gpu(monkeypatch):
    """Result files name a GPU, as if they had been measured on one."""
    found = {**common.environment(), "gpu": GPU, "driver": "1.0"}
    monkeypatch.setattr(common, "environment", lambda: found)


def timing(ms):
    return common.Timing([0.9 * ms, ms, 1.2 * ms], 50.0)


def write_ladder(folder, walls):
    """A ladder at context 128 with ms/token per rung; None is a SKIPPED row."""
    results = common.Results("decode_ladder", {"model_path": "random:tiny", "dtype": "float16"}, "by hand")
    results.numbers["bandwidth_gb_per_s"] = 1000.0
    rows = []
    for rung in decode_ladder.RUNGS:
        if rung.number not in walls:
            continue
        case, wall = {"context": 128, "rung": rung.number, "name": rung.name}, walls[rung.number]
        if wall is None:
            rows.append(results.add(case, common.SKIPPED, reason="no such GPU | here"))
            continue
        rows.append(
            results.add(
                case, timing=timing(wall), tokens_per_s=1e3 / wall, floor_ms=1.5, share_of_floor=1.5 / wall,
                gpu_busy_ms=1.0, gpu_idle_ms=wall - 1.0, kernels_per_token=100.0, launches_per_token=10.0, ttft_ms=5.0,
            )
        )  # fmt: skip
    decode_ladder.add_bought(rows)
    return results.write_as(GPU, folder)
