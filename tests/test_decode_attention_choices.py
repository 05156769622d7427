"""The script that tries other launches of decode attention: what it takes, its rows, its marks."""

import argparse

import pytest
from triton.runtime.errors import OutOfResources

from benchmarks import common
from benchmarks import decode_attention_choices as script
from kernels.decode_attention_wrapper import DecodeLaunch, choose_num_programs
from kernels.device import device_info

pytest_plugins = ["tests.fake_gpu"]


def test_changes_have_the_fields_types():
    text = "interleaved=1,splits=6,programs_per_sm=1.75,next_after=partials"
    changed = script.changes(text)
    assert changed == {"interleaved": True, "splits": 6, "programs_per_sm": 1.75, "next_after": "partials"}
    assert changed["interleaved"] is True and script.label(changed) == text
    with pytest.raises(argparse.ArgumentTypeError, match=r"'stages=3' sets none of rows, block_t, .*, splits"):
        script.changes("tma=1,stages=3")
    with pytest.raises(argparse.ArgumentTypeError, match=r"'tma': expected a number after tma="):
        script.changes("tma")
    for value in ("1", "never", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=r"expected keys, partials or end after next_after="):
            script.changes(f"next_after={value}")
    for text in (*script.CHANGES, *script.TINY_CHANGES):
        assert script.changes(text)


def test_a_contender_is_the_choice_but_for_its_changes(monkeypatch):
    asked = []
    chosen = DecodeLaunch(4, 32, 4, 4, 1, 6, 8, True, False, 16, False, "end", False)
    monkeypatch.setattr(script, "default_launch", lambda q, k, v: chosen)
    monkeypatch.setattr(script, "_launch", lambda q, k, v, n, *options, **launch: asked.append((n, options, launch)))
    ((q, k, v),), _ = script.step4.make_inputs(script.step4.TINY_SHAPES[1], 40, 1, script.torch.float32, "cpu")
    script.contender({"next_after": "keys", "splits": 3})(q, k, v)
    script.contender({"num_stages": 2})(q, k, v)
    assert asked[0] == (40, (None, None, None), {"choice": chosen._replace(next_after="keys"), "num_programs": 3 * 2})
    programs = choose_num_programs(chosen, 1, 2, 2, 40, device_info(q.device).sm_count)
    assert asked[1][2] == {"choice": chosen._replace(num_stages=2), "num_programs": programs}


def test_without_a_gpu_answers_are_checked(monkeypatch, no_gpu, capsys):
    monkeypatch.setattr(script.step4, "TINY_LENGTHS", [40])
    monkeypatch.setattr(script.step4, "TINY_SHAPES", script.step4.TINY_SHAPES[1:])
    assert no_gpu.run(script)
    assert "splits=3,interleaved=0" in capsys.readouterr().out and list(no_gpu.folder.iterdir()) == []
    attend = script.contender

    def wrong(changed):
        return lambda q, k, v: attend(changed)(q, k, v) * (2 if "splits" in changed else 1)

    monkeypatch.setattr(script, "contender", wrong)
    assert not no_gpu.run(script)


def test_measured_rows(monkeypatch, fake_gpu, capsys):
    """A launch that fails is a row; the choice itself that fails is a failure of the run."""

    def contender(changed):
        def attend(q, k, v):
            if changed.get("splits") == 9:
                raise OutOfResources(300000, 232448, "shared memory")
            scores = (q[:, :, None] @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * q.shape[2] ** -0.5
            return (scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1))[:, :, 0]

        return attend

    monkeypatch.setattr(script, "contender", contender)
    monkeypatch.setattr(script.step4, "SHAPES", script.step4.TINY_SHAPES)
    assert fake_gpu.run(script, "splits=9", "next_after=keys", "--lengths", "40", "--shapes", "1")
    rows = {row["case"]["contender"]: row for row in fake_gpu.rows("decode_attention_choices")}
    passed = {name for name, row in rows.items() if row["status"] == common.PASSED}
    assert passed == {script.TAKEN, "next_after=keys", script.step4.READ} and len(rows) == 4
    assert "out of resource: shared memory" in rows["splits=9"]["reason"]
    assert "launch" in capsys.readouterr().out
    monkeypatch.setattr(script, "contender", lambda changed: contender({"splits": 9}))
    assert not fake_gpu.run(script, "next_after=keys", "--lengths", "40", "--shapes", "1")


def test_out_of_memory_is_a_row(monkeypatch, fake_gpu):
    def no_memory(*_):
        raise script.torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(script.step4, "make_inputs", no_memory)
    assert fake_gpu.run(script, "--lengths", "40", "--shapes", "0")
    assert [row["status"] for row in fake_gpu.rows("decode_attention_choices")] == [common.OOM]


def test_a_mark_needs_every_sample_below_the_choice():
    def row(*samples):
        timing = common.Timing(list(samples), 1.0)
        return {"status": common.PASSED, "median_ms": timing.median_ms, "samples_ms": timing.samples_ms}

    taken = row(0.0100, 0.0102)
    assert script.cell(row(0.0097, 0.0099), taken) == "9.80*"
    assert script.cell(row(0.0097, 0.0101), taken) == "9.90"
    assert script.cell({"status": common.OOM}, taken) == common.OOM
    assert script.cell(row(0.0097), {"status": common.OOM}) == "9.70"


@pytest.mark.gpu
def test_a_short_run_on_the_gpu(real_gpu):
    assert real_gpu.run(script, "num_stages=2", "--lengths", "512", "--shapes", "1", "--samples", "3")
    rows = real_gpu.rows("decode_attention_choices")
    assert [row["status"] for row in rows] == [common.PASSED] * 3
