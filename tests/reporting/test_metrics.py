"""Metrics: written whole, trimmed on resume, and only under documented names."""

import json
import math
import os
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto import event_pb2

from ragen_jax.errors import UserError
from ragen_jax.reporting import metrics, plots


def test_a_record_comes_back_exactly_as_it_was_written(tmp_path):
    with _metrics_writer(tmp_path) as metrics_writer:
        metrics_writer.write(0, {"validation/success": 0.125})
        metrics_writer.write(
            1,
            {
                "train/success": jnp.float32(0.1),
                "update/count": 7,
                "rollout/turns": np.float64(2.5),
            },
        )
    assert metrics.read(tmp_path) == [
        {"iteration": 0, "validation/success": 0.125},
        {
            "iteration": 1,
            "train/success": float(np.float32(0.1)),
            "update/count": 7,
            "rollout/turns": 2.5,
        },
    ]


def test_a_record_is_on_disk_before_the_run_is_closed(tmp_path):
    metrics_writer = _metrics_writer(tmp_path)
    metrics_writer.write(1, {"train/return": 0.5})
    text = (tmp_path / metrics.FILE).read_text()
    metrics_writer.close()
    assert text == '{"iteration": 1, "train/return": 0.5}\n'


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_records_do_not_go_to_a_file_that_was_deleted_or_replaced(change, tmp_path):
    path = tmp_path / metrics.FILE
    with _metrics_writer(tmp_path) as metrics_writer:
        metrics_writer.write(1, {"train/return": 0.5})
        if change == "deleted":
            path.unlink()
        else:  # As `sed -i` does.
            (tmp_path / "new").write_bytes(path.read_bytes())
            (tmp_path / "new").rename(path)
        metrics_writer.write(2, {"train/return": 0.5})
    reached = [record["iteration"] for record in metrics.read(tmp_path)]
    assert reached == ([2] if change == "deleted" else [1, 2])


def test_records_of_finished_iterations_that_are_missing_are_told(tmp_path):
    assert metrics.lacking(tmp_path, 0) == ""
    assert "lacks 2 of the 2 finished iter" in metrics.lacking(tmp_path, 2)
    (tmp_path / metrics.FILE).write_bytes(_lines(1, 4, 4))
    said = metrics.lacking(tmp_path, 4)
    assert "lacks 2 of the 4 finished iterations, the first of them 2, as" in said
    assert metrics.lacking(tmp_path, 1) == ""


def test_what_was_written_is_on_disk_after_a_sync(tmp_path, monkeypatch):
    synced = []
    with _metrics_writer(tmp_path) as metrics_writer:
        metrics_writer.write(1, {"train/return": 0.5})
        monkeypatch.setattr(os, "fsync", lambda n: synced.append(os.fstat(n).st_ino))
        metrics_writer.sync()
        monkeypatch.undo()
    assert synced == [(tmp_path / metrics.FILE).stat().st_ino]


def test_a_pipe_in_place_of_the_metrics_is_not_read(tmp_path):
    os.mkfifo(tmp_path / metrics.FILE)
    with pytest.raises(UserError, match="metrics.jsonl cannot be read: it is a pipe"):
        metrics.read(tmp_path)


def test_a_value_that_is_not_finite_is_null_and_stays_out_of_the_views(tmp_path):
    with _metrics_writer(tmp_path) as metrics_writer:
        metrics_writer.write(1, {"update/kl": math.nan, "train/success": 0.5})
        metrics_writer.write(2, {"update/kl": math.inf})
    lines = (tmp_path / metrics.FILE).read_text().splitlines()
    assert [json.loads(line)["update/kl"] for line in lines] == [None, None]
    assert _scalars(tmp_path) == [("train/success", 1, 0.5)]


def test_a_name_that_is_not_documented_is_refused(tmp_path):
    wrong = (
        "train/sucess",
        "success",
        "validation/",
        "train/pass_at_4",
        "test/pass_at_0",
        "validation/pass_at_<k>",
        "validation/success/extra",
    )
    with _metrics_writer(tmp_path) as metrics_writer:
        for name in wrong:
            with pytest.raises(KeyError, match="METRICS"):
                metrics_writer.write(1, {"train/success": 0.5, name: 1.0})
    assert metrics.read(tmp_path) == []


def test_the_two_evaluations_share_one_set_of_names_and_pass_at_any_k():
    names = {
        split: {
            name.removeprefix(split)
            for name in metrics.METRICS
            if name.startswith(split)
        }
        for split in ("validation/", "test/")
    }
    of_each = {f"<environment>/{name}" for name in metrics.EVALUATION}
    both = set(metrics.EVALUATION) | of_each
    assert names["validation/"] == names["test/"] == both
    assert metrics.describe("test/my-lake_2/success").unit == "1"
    assert metrics.describe("test/pass_at_16").unit == "1"
    assert metrics.describe("test/pass_at_4_hard/pass_at_16").unit == "1"
    assert "pass@k" in metrics.describe("validation/pass_at_4_standard_error").meaning


def test_what_is_not_a_number_is_refused(tmp_path):
    with _metrics_writer(tmp_path) as metrics_writer:
        for value in ("0.5", None, True, [1.0]):
            with pytest.raises(TypeError, match="train/success"):
                metrics_writer.write(1, {"train/success": value})


def test_iterations_never_fall_but_may_add_a_second_line(tmp_path):
    with _metrics_writer(tmp_path) as metrics_writer:
        metrics_writer.write(3, {"train/success": 0.5})
        metrics_writer.write(3, {"test/success": 0.6})
        with pytest.raises(ValueError, match="iteration=2 comes after 3"):
            metrics_writer.write(2, {"train/success": 0.5})
    assert [record["iteration"] for record in metrics.read(tmp_path)] == [3, 3]


def test_other_processes_check_names_and_write_nothing(tmp_path):
    workdir = tmp_path / "run"
    with metrics.MetricsWriter(
        workdir, is_writer=False, first_iteration=0
    ) as metrics_writer:
        metrics_writer.write(1, {"train/success": 0.5})
        with pytest.raises(KeyError):
            metrics_writer.write(2, {"nonsense": 0.5})
    assert not workdir.exists()


def test_trimming_drops_what_lies_past_the_checkpoint_and_half_a_line(tmp_path):
    path = tmp_path / metrics.FILE
    path.write_bytes(_lines(1, 2, 3, 4) + b'{"iteration": 5, "train/suc')
    metrics.trim(tmp_path, 3)
    assert path.read_bytes() == _lines(1, 2, 3)
    assert [entry.name for entry in tmp_path.iterdir()] == [metrics.FILE]


@pytest.mark.parametrize("line", [b'{"iteration": 3', b'{"iteration": 3, "a": 1', b"{"])
def test_a_half_written_line_alone_is_cut_off(line, tmp_path):
    path = tmp_path / metrics.FILE
    path.write_bytes(_lines(1, 2) + line)
    metrics.trim(tmp_path, 9)
    assert path.read_bytes() == _lines(1, 2)


def test_a_line_that_lacks_its_end_alone_is_kept_and_ended(tmp_path):
    path = tmp_path / metrics.FILE
    path.write_bytes(_lines(1, 2, 3).removesuffix(b"\n"))
    metrics.trim(tmp_path, 9)
    assert path.read_bytes() == _lines(1, 2, 3)


def test_trimming_leaves_a_file_that_needs_none_untouched(tmp_path):
    path = tmp_path / metrics.FILE
    path.write_bytes(_lines(1, 2))
    before = path.stat().st_ino
    metrics.trim(tmp_path, 2)
    assert (path.stat().st_ino, path.read_bytes()) == (before, _lines(1, 2))


def test_there_is_nothing_to_trim_or_read_in_an_empty_workdir(tmp_path):
    metrics.trim(tmp_path, 5)
    assert metrics.read(tmp_path) == []


BROKEN = [
    *(b"{broken", b"[1]", b'{"train/success": 1}', b"", b'"5"'),
    *(b'{"iteration": 1e999}', b"[" * 100_000, b'{"iteration": -1}'),
    *(b'{"iteration": 1, "a": %s}' % a for a in (b"NaN", b"-1e999", b"9" * 400)),
    b'{"iteration": 2147483648}',
]


@pytest.mark.parametrize("line", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_in_the_middle_is_named(line, tmp_path):
    (tmp_path / metrics.FILE).write_bytes(_lines(1) + line + b"\n" + _lines(2))
    with pytest.raises(UserError, match=r"Line 2 of .*metrics\.jsonl"):
        metrics.read(tmp_path)


@pytest.mark.slow
def test_a_resumed_run_has_the_record_of_an_uninterrupted_one(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with _metrics_writer(whole) as metrics_writer:
        for iteration in range(1, 7):
            metrics_writer.write(iteration, {"train/success": iteration / 8})
    with _metrics_writer(resumed) as metrics_writer:
        for iteration in range(1, 6):  # died in 5; its checkpoint is of 3
            metrics_writer.write(iteration, {"train/success": iteration / 8})
    with metrics.MetricsWriter(
        resumed, is_writer=True, first_iteration=4
    ) as metrics_writer:
        for iteration in range(4, 7):
            metrics_writer.write(iteration, {"train/success": iteration / 8})
    assert (resumed / metrics.FILE).read_bytes() == (whole / metrics.FILE).read_bytes()


@pytest.mark.slow
def test_a_resumed_run_lets_tensorboard_forget_what_is_repeated(tmp_path):
    with _metrics_writer(tmp_path) as metrics_writer:
        metrics_writer.write(1, {"train/success": 0.25})
        metrics_writer.write(2, {"train/success": 0.75})
    with metrics.MetricsWriter(
        tmp_path, is_writer=True, first_iteration=2
    ) as metrics_writer:
        metrics_writer.write(2, {"train/success": 0.5})
    first, second = sorted(
        _events(path) for path in (tmp_path / metrics.TENSORBOARD).iterdir()
    )
    start = event_pb2.SessionLog.START
    assert [event.step for event in second if event.session_log.status == start] == [2]
    assert _values(first) == [("train/success", 1, 0.25), ("train/success", 2, 0.75)]
    assert _values(second) == [("train/success", 2, 0.5)]


@pytest.mark.slow
def test_the_picture_is_a_readable_png_that_changes_with_the_data(tmp_path):
    pictures = []
    for slope in (0.0, 0.02):
        with _metrics_writer(tmp_path / f"{slope}") as metrics_writer:
            for iteration in range(1, 31):
                metrics_writer.write(iteration, _typical(iteration, slope))
        with Image.open(tmp_path / f"{slope}" / metrics.PICTURE) as image:
            image.load()
            assert image.format == "PNG"
            pictures.append(np.asarray(image.convert("RGB")))
    flat, rising = pictures
    assert flat.shape == rising.shape and flat.shape[0] >= 600
    # The first chart (success) lies in the upper left sixth.
    height, width = flat.shape[0] // 2, flat.shape[1] // 3
    assert (flat[:height, :width] != rising[:height, :width]).any()
    # Nearly white paper with ink on it.
    assert 0.02 < (flat < 200).any(axis=-1).mean() < 0.3


def test_a_folder_may_have_a_name_that_is_no_text(tmp_path):
    with _metrics_writer(tmp_path / os.fsdecode(b"caf\xe9")) as metrics_writer:
        metrics_writer.write(1, {"train/success": 0.25})
    (folder,) = tmp_path.iterdir()
    assert (folder / metrics.PICTURE).stat().st_size > 1000


def test_a_run_without_any_record_still_has_a_picture(tmp_path):
    _metrics_writer(tmp_path).close()
    with Image.open(tmp_path / metrics.PICTURE) as image:
        image.verify()


def test_a_folder_named_like_a_formula_has_a_picture(tmp_path):
    units = {name: metric.unit for name, metric in metrics.METRICS.items()}
    plots.draw([], tmp_path / "x.png", title="lr$\\nothing{$", units=units)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_every_line_of_the_picture_is_a_documented_metric():
    for chart in plots.CHARTS:
        units = {metrics.describe(line.metric).unit for line in chart.lines}
        assert len(units) == 1
        for line in chart.lines:
            assert not line.error or metrics.describe(line.error)


def test_smoothing_matches_hand_computed_values():
    values = np.array([1.0, 3.0, 8.0, 4.0, 2.0])
    # Windows of 1, 3, 5, 3 and 1 values; with a reach of 1, of 1, 3, 3, 3 and 1.
    np.testing.assert_allclose(plots.smooth(values, 2), [1, 4, 3.6, 14 / 3, 2])
    np.testing.assert_allclose(plots.smooth(values, 1), [1, 4, 5, 14 / 3, 2])


def test_smoothing_leaves_straight_lines_and_with_reach_0_everything_as_it_is():
    values = np.array([2.0, -1.0, 4.0])
    np.testing.assert_allclose(plots.smooth(values, 0), values)
    falling = np.linspace(0.24, 0.13, 60)
    np.testing.assert_allclose(plots.smooth(falling, plots.REACH), falling)


def test_a_smoothed_fall_lies_among_its_values_and_not_above_them():
    falling = np.exp(-np.arange(60) / 10) + 0.01 * (-1.0) ** np.arange(60)
    smoothed = plots.smooth(falling, plots.REACH)
    above = (smoothed > falling).mean()
    assert 0.4 < above < 0.75


def _metrics_writer(workdir):
    return metrics.MetricsWriter(workdir, is_writer=True, first_iteration=0)


def _lines(*iterations):
    return b"".join(b'{"iteration": %d}\n' % iteration for iteration in iterations)


def _typical(iteration, slope):
    names = [line.metric for chart in plots.CHARTS for line in chart.lines]
    return {name: 0.2 + slope * iteration for name in names}


def _events(path):
    """The events of a file of TFRecords: length, checksum, data, checksum."""
    data, events, start = path.read_bytes(), [], 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        body = data[start + 12 : start + 12 + length]
        events.append(event_pb2.Event.FromString(body))
        start += 12 + length + 4
    return _Events(events)


class _Events(list):
    """Sorted by the time at which their file was begun."""

    def __lt__(self, other):
        return self[0].wall_time < other[0].wall_time


def _values(events):
    return [
        (value.tag, event.step, value.simple_value)
        for event in events
        for value in event.summary.value
    ]


def _scalars(workdir):
    (path,) = (workdir / metrics.TENSORBOARD).iterdir()
    return _values(_events(path))
