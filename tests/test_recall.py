"""Verdicts on disk: what is kept is found, what is damaged, foreign or forged is not, and no disk ends a run."""

import json
import multiprocessing
import os
import shutil
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from compile_profiler import recall
from compile_profiler.recall import MAX_BYTES, Entry, Tried, VerdictCache, default_folder

EAGER = {"target": None, "mode": None}
STEP = {"target": "step", "mode": None, "dynamic": True}
GRAPHS = {"target": ("net", "head"), "mode": "reduce-overhead", "options": {"triton.cudagraphs": True}}
CANDIDATES = [EAGER, STEP, GRAPHS]
KEY, OTHER_KEY = "a" * 64, "0123456789abcdef" * 4

ENTRY = Entry(
    key=KEY,
    job="Model",
    device="cpu",
    torch="2.13.0",
    winner=GRAPHS,
    tried=(
        Tried(candidate=STEP, compile_s=17.0, speedup=0.5, low=0.25, high=0.75),
        Tried(candidate=GRAPHS, compile_s=30, speedup=1.5),
    ),
    when_s=1.75e9,
)
GOOD = json.dumps(ENTRY.to_dict())
only_posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes of POSIX")
only_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def cache(tmp_path):
    """An empty cache in a folder that is not there yet."""
    return VerdictCache(tmp_path / "below" / "cache")


@pytest.fixture
def file(cache):
    """Where the entry under KEY is to lie."""
    cache.folder.mkdir(parents=True)
    return cache.folder / f"{KEY}.json"


def test_what_was_kept_is_found_by_another_instance(cache):
    assert cache.get([KEY], CANDIDATES) is None
    assert cache.put(ENTRY)

    found = VerdictCache(cache.folder).get([KEY], CANDIDATES)

    assert found == ENTRY
    assert found.result.speedup == 1.5
    assert cache.get([OTHER_KEY], CANDIDATES) is None
    assert [entry.job for entry, _ in cache.entries()] == ["Model"]


def test_the_first_key_that_is_known_counts(cache):
    cache.put(ENTRY)
    cache.put(replace(ENTRY, key=OTHER_KEY, winner=STEP))

    assert cache.get([KEY, OTHER_KEY], CANDIDATES).winner == GRAPHS
    assert cache.get([OTHER_KEY, KEY], CANDIDATES).winner == STEP
    assert cache.get(["b" * 64, OTHER_KEY], CANDIDATES).winner == STEP


def test_only_what_is_offered_comes_back(cache):
    """The winner that is chosen is the caller's own, not its likeness from the file, where 1 would equal True."""
    cache.put(ENTRY)
    cache.put(replace(ENTRY, key=OTHER_KEY, winner={**STEP, "dynamic": 1}))

    found = cache.get([KEY], [EAGER, GRAPHS])

    assert found.winner == GRAPHS
    assert isinstance(found.winner["target"], tuple)
    assert [each.candidate for each in found.tried] == [GRAPHS]
    assert cache.get([KEY], [EAGER, STEP]) is None
    assert cache.get([OTHER_KEY], CANDIDATES) is None


def test_a_later_verdict_takes_the_place_of_an_earlier_one(cache):
    cache.put(ENTRY)
    cache.put(replace(ENTRY, winner=STEP, tried=()))

    assert cache.get([KEY], CANDIDATES).winner == STEP
    assert cache.get([KEY], CANDIDATES).result == Tried(candidate=STEP)
    assert len(cache.files()) == 1


def changed(**fields):
    return json.dumps({**ENTRY.to_dict(), **fields})


def with_tried(**fields):
    return changed(tried=[{**ENTRY.to_dict()["tried"][1], **fields}])


FORGED = {
    "empty": "",
    "half": GOOD[:200],
    "binary": bytes(range(256)),
    "a list": "[1, 2]",
    "bottomless": "[" * 60_000,
    "an object without a bottom": changed(winner=0).replace(
        '"winner": 0', '"winner": ' + '{"a":' * 400 + "1" + "}" * 400
    ),
    "a later schema": changed(schema=2),
    "a schema that equals 1": changed(schema=True),
    "no schema's type": changed(schema=1.0),
    "no winner": json.dumps({key: value for key, value in ENTRY.to_dict().items() if key != "winner"}),
    "a winner that is a text": changed(winner="step"),
    "a winner that nobody offers": changed(winner={"target": "step", "mode": "rm -rf /"}),
    "a winner with too much": changed(winner={**ENTRY.to_dict()["winner"], "hook": "os.system"}),
    "a winner with NaN": changed(winner={**STEP, "x": float("nan")}),
    "a winner with NaN in its options": changed(winner={**STEP, "options": {"x": [float("nan")]}}),
    "NaN": changed(when_s=float("nan")),
    "infinity": GOOD.replace("1750000000.0", "1e999"),
    "minus infinity": changed(when_s=float("-inf")),
    "before all time": changed(when_s=-1.0),
    "a number for no float": changed(when_s=10**400),
    "a number for no machine": GOOD.replace("1750000000.0", "9" * 10_000),
    "a time that is a text": changed(when_s="now"),
    "a job that is a list": changed(job=["Model"]),
    "tried is an object": changed(tried={"a": 1}),
    "seconds that are a bool": with_tried(compile_s=True),
    "negative seconds": with_tried(compile_s=-1.0),
    "no speedup": with_tried(speedup=0.0),
    "a speedup beyond all": with_tried(speedup=1e300),
    "a candidate that is a list": with_tried(candidate=[]),
    "the key of another": changed(key=OTHER_KEY),
    "no key": changed(key="../" + "a" * 61),
    "too large": GOOD + " " * MAX_BYTES,
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
def test_what_no_run_would_write_is_not_found(content, cache, file):
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    file.chmod(0o600)

    assert cache.get([KEY], CANDIDATES) is None
    assert len(cache.entries()) <= 1  # which may list a winner that nobody offers
    assert cache.put(ENTRY)
    assert cache.get([KEY], CANDIDATES) == ENTRY


def test_the_same_file_unforged_is_found(cache, file):
    """So that each of the above fails for the one thing that is wrong with it."""
    file.write_text(GOOD)
    file.chmod(0o600)

    assert cache.get([KEY], CANDIDATES) == ENTRY


def linked(file, tmp_path):
    outside = tmp_path / "outside.json"
    outside.write_text(GOOD)
    outside.chmod(0o600)
    file.symlink_to(outside)


def written(mode):
    def lay(file, tmp_path):
        file.write_text(GOOD)
        file.chmod(mode)

    return lay


def given_away(file, tmp_path):
    written(0o644)(file, tmp_path)
    os.chown(file, 12345, -1)


STRANGE = {
    "a link": linked,
    "a link to itself": lambda file, _: file.symlink_to(file),
    "a pipe": lambda file, _: os.mkfifo(file, 0o600),
    "written by its group": written(0o620),
    "written by the world": written(0o602),
    "of another user": pytest.param(given_away, marks=only_root),
}


@only_posix
@pytest.mark.parametrize("lay", STRANGE.values(), ids=STRANGE)
def test_a_file_that_others_may_have_written_is_not_found_and_not_followed(lay, cache, file, tmp_path):
    lay(file, tmp_path)
    assert cache.get([KEY], CANDIDATES) is None
    assert cache.entries() == []

    assert cache.put(replace(ENTRY, winner=STEP))

    assert cache.get([KEY], CANDIDATES).winner == STEP
    assert stat.S_ISREG(file.lstat().st_mode)
    if lay is linked:
        assert (tmp_path / "outside.json").read_text() == GOOD


def test_a_folder_in_the_place_of_an_entry_is_left_alone(cache, file):
    file.mkdir()

    assert cache.get([KEY], CANDIDATES) is None
    assert not cache.put(ENTRY)
    assert list(cache.folder.iterdir()) == [file]


@pytest.mark.skipif(sys.platform != "linux", reason="open files are listed in /proc")
@pytest.mark.parametrize("lay", [lambda file, _: file.mkdir(), written(0o600), written(0o666)])
def test_no_file_stays_open(lay, cache, file, tmp_path):
    lay(file, tmp_path)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        cache.get([KEY], CANDIDATES)

    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


@only_posix
def test_nobody_else_can_read_it_from_its_first_moment(cache):
    """Whatever the umask is: the modes are given when folder and file are made, and not afterwards."""
    before = os.umask(0)
    try:
        cache.put(ENTRY)
    finally:
        os.umask(before)

    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (cache.folder, *cache.files())}
    assert list(modes.values()) == [0o700, 0o600]


@pytest.mark.parametrize("place", ["/proc/sys/kernel", "/proc/sys/kernel/cache", "file", "file/cache"])
def test_a_folder_that_cannot_be_written_keeps_nothing(place, tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = VerdictCache(tmp_path / place)

    assert cache.get([KEY], CANDIDATES) is None
    assert cache.put(ENTRY) is False
    assert (tmp_path / "file").read_text() == "in the way"


def test_no_folder_keeps_nothing():
    assert VerdictCache(None).get([KEY], CANDIDATES) is None
    assert VerdictCache(None).put(ENTRY) is False
    assert VerdictCache(None).entries() == []


def test_an_entry_that_is_too_large_is_not_kept(cache):
    large = {**STEP, "names": ["x" * 100] * 1000}

    assert cache.put(replace(ENTRY, winner=large)) is False
    assert cache.files() == []


@pytest.mark.parametrize(
    "winner",
    [
        {"mode": float("nan")},
        {"options": {"x": [float("inf")]}},
        {"a": {"b": {"c": {"d": {"e": 1}}}}},
        {"backend": print},
    ],
)
def test_a_caller_that_would_keep_what_cannot_be_read_back_is_told(winner):
    with pytest.raises(ValueError, match="winner"):
        replace(ENTRY, winner=winner)


def in_another_process(action, *arguments):
    """Start ``action`` in a copy of this process, which has everything imported."""
    process = multiprocessing.get_context("fork").Process(target=action, args=arguments)
    process.start()
    return process


def ended(processes):
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def on_a_full_disk(folder):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # bytes of a file: as little as there is
    assert VerdictCache(folder).put(replace(ENTRY, winner=STEP)) is False


@only_posix
def test_a_full_disk_leaves_the_earlier_verdict(cache):
    cache.put(ENTRY)

    assert ended([in_another_process(on_a_full_disk, cache.folder)]) == [0]

    assert cache.get([KEY], CANDIDATES) == ENTRY
    assert len(list(cache.folder.iterdir())) == 1


def busy(folder, n):
    """Write and read at once; after the first verdict there is always one, and always a whole one."""
    cache, keys = VerdictCache(folder), [f"{k:064x}" for k in range(3)]
    for i in range(30):
        key = keys[i % 3]
        assert cache.put(replace(ENTRY, key=key, job="x" * 1000 * n, when_s=float(i)))
        found = cache.get([key], CANDIDATES)
        assert found is not None
        assert set(found.job) <= {"x"}
        cache.entries()


@only_posix
def test_eight_processes_write_at_the_same_time(cache):
    assert ended([in_another_process(busy, cache.folder, n) for n in range(8)]) == [0] * 8

    assert sorted(file.stem for file in cache.folder.iterdir()) == [f"{k:064x}" for k in range(3)]
    assert len(cache.entries()) == 3


def test_the_oldest_go_where_there_are_too_many(cache, monkeypatch):
    monkeypatch.setattr(recall, "MAX_ENTRIES", 3)
    for k in range(3):
        cache.put(replace(ENTRY, key=f"{k:064x}"))
        os.utime(cache.folder / f"{k:064x}.json", (1000 - k, 1000 - k))
    (cache.folder / "notes.json").write_text("not ours")
    cache.put(ENTRY)

    assert [file.stem for file in cache.files()] == [f"{0:064x}", f"{1:064x}", KEY]
    assert (cache.folder / "notes.json").exists()


def test_what_a_killed_process_left_is_cleared_away_in_time(cache):
    cache.put(ENTRY)
    drafts = [cache.folder / f".compile-profiler-{name}.tmp" for name in ("old", "new")]
    for draft in drafts:
        draft.write_text("half")
    os.utime(drafts[0], (1000, 1000))
    cache.put(ENTRY)

    assert [draft.exists() for draft in drafts] == [False, True]


def test_clearing_takes_what_was_asked_for(cache):
    keys = [f"{k:064x}" for k in range(1, 4)]
    for age_s, key in enumerate(keys):
        cache.put(replace(ENTRY, key=key))
        os.utime(cache.folder / f"{key}.json", (1e9 - 1000 * age_s,) * 2)
    (cache.folder / "notes.json").write_text("not ours")

    assert cache.clear(prefix="1") == 0
    assert cache.clear(prefix=keys[0]) == 1
    assert cache.clear(older_than_s=1e12) == 0
    assert [file.stem for file in cache.files()] == keys[1:]
    (cache.folder / f"{keys[2]}.json").write_text("damaged")
    os.utime(cache.folder / f"{keys[1]}.json", (4e9, 4e9))
    assert cache.clear() == 2
    assert [file.name for file in cache.folder.iterdir()] == ["notes.json"]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"COMPILE_PROFILER_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"COMPILE_PROFILER_CACHE_DIR": "~/b", "HOME": "/h"}, "/h/b"),
        ({"COMPILE_PROFILER_CACHE_DIR": "~nobody-of-this-name/b"}, None),
        ({"COMPILE_PROFILER_CACHE_DIR": "", "XDG_CACHE_HOME": "/x"}, "/x/compile_profiler"),
        ({"XDG_CACHE_HOME": "not/absolute", "HOME": "/h"}, "/h/.cache/compile_profiler"),
        ({"HOME": "/h"}, "/h/.cache/compile_profiler"),
    ],
)
@only_posix
def test_the_folder_is_found_as_the_system_has_it(environment, folder, monkeypatch):
    for name in ("COMPILE_PROFILER_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert default_folder() == (folder and Path(folder))


def test_a_home_that_has_gone_keeps_nothing(tmp_path, monkeypatch):
    """The folder may be moved or cleared under a run's feet."""
    cache = VerdictCache(tmp_path / "cache")
    cache.put(ENTRY)
    shutil.rmtree(cache.folder)

    assert cache.get([KEY], CANDIDATES) is None
    assert cache.entries() == []
    assert cache.clear() == 0
    assert cache.put(ENTRY)
