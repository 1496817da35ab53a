"""The command line as a user runs it: imports, found files, and answers."""

import csv
import importlib
import io
import json
import logging
import os
import pkgutil
import platform
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

import service.cli
import vitserve.pictures as pictures_of_clients
from model.checkpoint import load_checkpoint
from service.cli.main import commands, main
from tests.conftest import REPOSITORY
from tests.needs import needs
from tests.service.cli.command_line import run, write_checkpoint, write_pictures
from tests.stub_server import answering
from tests.vitserve.answers import CAT, MODEL

pytestmark = pytest.mark.timeout(120)  # processes start, each of which imports torch


def test_classify_walks_a_folder_in_order(
    checkpoint: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload = (pictures / "b.PNG").rename(tmp_path / "upload")  # a named file may have any suffix
    files = [upload, write_pictures(pictures, "b.PNG")]
    code, out, err = run(
        capsys, "classify", *files, "--checkpoint", checkpoint, "--json", "--top-k", "3"
    )
    assert code == 0
    assert err.strip() == ""
    answers = [json.loads(line) for line in out.splitlines()]
    assert [Path(answer["file"]).name for answer in answers] == [
        "upload",
        "a.jpg",
        "b.PNG",
        "c.webp",
    ]
    for answer in answers:
        scores = [found["score"] for found in answer["predictions"]]
        assert scores == sorted(scores, reverse=True)
        assert sum(scores) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "command", ["classify", "attention", pytest.param("inspect", marks=needs("evaluation"))]
)
def test_a_folder_of_models_is_not_one_model(
    command: str,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VIT_MODELS", str(tmp_path))
    arguments: dict[str, list[object]] = {
        "classify": [pictures],
        "attention": [pictures, "-o", tmp_path / "maps"],
        "inspect": [],
    }
    code, _, err = run(capsys, command, *arguments[command])
    assert code == 1
    assert "has several models, and this command loads one: name its folder or file with" in err


def test_links_to_folders_are_followed_once(
    checkpoint: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "elsewhere", "d.png")
    (pictures / "linked").symlink_to(tmp_path / "elsewhere")
    (pictures / "deep" / "itself").symlink_to(pictures)
    code, out, err = run(capsys, "classify", pictures, "--checkpoint", checkpoint, "--json")
    files = [json.loads(line)["file"] for line in out.splitlines()]
    names = [str(Path(file).relative_to(pictures)) for file in files]
    assert (code, err) == (0, "")
    assert names == ["a.jpg", "b.PNG", "deep/c.webp", "linked/d.png"]


def test_a_broken_link_is_an_error(
    checkpoint: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "lost.jpg").symlink_to("nowhere.jpg")
    code, out, err = run(capsys, "classify", pictures, "--checkpoint", checkpoint, "--csv")
    assert code == 1
    assert "1 of 4 files" in err
    assert "No such file" in next(
        row["error"] for row in csv.DictReader(io.StringIO(out)) if row["file"].endswith("lost.jpg")
    )


@pytest.mark.parametrize("kind", ["named pipe", "device"])
def test_path_that_is_no_file_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("/dev/zero")
    if kind == "named pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    code, _, err = run(capsys, "classify", path)
    assert (code, err) == (
        1,
        f"vitserve: {path}: not a file: write the picture to a file, and name it\n",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["classify", "~/a.jpg"], "the shell does not expand ~ and $ in quotes"),
        (["classify", "$HOME/a.jpg"], "the shell does not expand ~ and $ in quotes"),
        (["classify", "file:///a.jpg"], "leave out file://"),
        (["embed", "a.jpg", "-o", "~/a.npy"], "the shell does not expand ~ and $ in quotes"),
    ],
)
def test_path_in_quotes_names_its_remedy(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *line)
    assert code == 1
    assert message in err


def test_switch_needs_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--strict"], ["--strict", "true"], ["--strict=true"]):
        assert run(capsys, "serve", *flags, "--port", "http")[2].startswith("vitserve: --port=")
    assert (
        "--strict='bundled': expected a valid boolean"
        in run(capsys, "serve", "--strict", "bundled")[2]
    )


def test_pipe_of_a_shell_is_read(
    checkpoint: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, (pictures / "a.jpg").read_bytes())
    os.close(writer)
    code, out, _ = run(capsys, "classify", f"/dev/fd/{reader}", "--checkpoint", checkpoint)
    os.close(reader)
    assert code == 0
    assert "cat" in out


def test_pipe_without_an_end_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures_of_clients, "MAX_FILE_BYTES", 1000)
    reader, writer = os.pipe()
    os.write(writer, bytes(1001))
    try:  # the writer never closes it
        code, out, _ = run(capsys, "classify", f"/dev/fd/{reader}", "--checkpoint", checkpoint)
    finally:
        os.close(reader)
        os.close(writer)
    assert code == 1
    assert "more than 1 GiB, or without an end" in out


def test_map_over_the_photo_needs_a_file(
    tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, (pictures / "a.jpg").read_bytes())
    os.close(writer)
    code, _, err = run(capsys, "attention", f"/dev/fd/{reader}", "-o", tmp_path / "map.png")
    os.close(reader)
    assert code == 1
    assert "a pipe is read only once" in err


def test_maps_of_an_earlier_run_are_left_out(
    tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "photos"
    write_pictures(folder, "a.jpg")
    for _ in range(2):
        code, _, err = run(capsys, "attention", folder, "-o", folder)
        assert code == 0
    assert "1 of 2 files are maps of an earlier run (*.heat.png)" in err
    assert sorted(path.name for path in folder.iterdir()) == ["a.heat.png", "a.jpg"]


def test_misspelt_variable_ends_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VIT_CHECKPIONT", "models/mine")
    code, _, err = run(capsys, "classify", "examples/dog.jpg")
    assert (code, err) == (
        1,
        "vitserve: VIT_CHECKPIONT is not a setting: did you mean VIT_CHECKPOINT? "
        "If not, unset it\n",
    )


def test_pictures_without_a_suffix_are_noted(
    checkpoint: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "deep" / "c.webp").rename(pictures / "deep" / "c")
    code, out, err = run(capsys, "classify", pictures, "--checkpoint", checkpoint, "--json")
    assert (code, len(out.splitlines())) == (0, 2)
    assert err == (
        f"vitserve: {pictures}: left out, because the names do not end like a picture's "
        "(.jpg, .png): deep/c; rename these files, or name each of them\n"
    )


def test_thresholds_leave_classes_out(
    checkpoint: Path,
    pictures: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VIT_THRESHOLDS", '{"cat": 1, "dog": 1, "bird, flying": 1}')
    _, out, _ = run(capsys, "classify", pictures / "a.jpg", "--checkpoint", checkpoint, "--json")
    assert json.loads(out) | {"predictions": [], "abstained": True} == json.loads(out)


def test_numpy_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert os.environ.get("OPENBLAS_NUM_THREADS") == (
        "1" if platform.machine() == "x86_64" else None
    )


@pytest.fixture
def printing() -> Iterator[list[str]]:
    """Yield a command that prints the answer of a server; it does not import torch."""
    with answering(
        lambda asked: (200, {}, json.dumps(MODEL if asked.path == "/model" else CAT).encode())
    ) as url:
        picture = str(REPOSITORY / "examples/dog.jpg")
        yield [sys.executable, "-m", "service", "classify", picture, "--url", url]


def test_full_disk_is_one_line(printing: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(printing, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "vitserve: standard output: No space left on device\n",
    )


def test_closed_pipe_ends_a_command_quietly(printing: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(printing, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_classify_goes_on_after_a_bad_file(
    checkpoint: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pictures / "aa.png").write_bytes((pictures / "b.PNG").read_bytes()[:60])
    code, out, err = run(
        capsys, "classify", pictures, "--checkpoint", checkpoint, "--csv", "--top-k", "1"
    )
    assert code == 1
    assert "1 of 4 files" in err
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [Path(row["file"]).name for row in rows] == ["a.jpg", "aa.png", "b.PNG", "c.webp"]
    assert [bool(row["error"]) for row in rows] == [False, True, False, False]
    assert all(row["label"] in ("cat", "dog", "bird, flying") for row in rows if not row["error"])


def test_a_csv_table_holds_no_formula(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny", ("=1+1", "+2", "-dog"))
    monkeypatch.chdir(write_pictures(tmp_path / "pictures", "@a.png"))
    code, out, _ = run(capsys, "classify", "@a.png", "--checkpoint", checkpoint, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert {row["label"] for row in rows} == {"'=1+1", "'+2", "'-dog"}
    assert {row["file"] for row in rows} == {"'@a.png"}
    assert all(0 <= float(row["score"]) <= 1 for row in rows)


def test_pillow_does_not_log_in_commands(
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # 32 x 32 pixels of 65,535 samples, which Pillow reports as an error.
    fields = [
        (256, 32),
        (257, 32),
        (258, 8),
        (259, 1),
        (262, 1),
        (273, 8),
        (277, 65_535),
        (279, 1024),
    ]
    entries = b"".join(struct.pack("<HHLL", tag, 3, 1, value) for tag, value in fields)
    tiff = tmp_path / "samples.tif"
    tiff.write_bytes(b"II*\0\x08\0\0\0" + struct.pack("<H", len(fields)) + entries + bytes(2048))
    caplog.set_level(logging.DEBUG, logger="PIL")
    code, out, err = run(capfd, "classify", tiff, "--checkpoint", checkpoint)
    assert code == 1
    assert "samples per pixel" in out
    assert err == "vitserve: 1 of 1 files have no answer\n"
    assert [record.name for record in caplog.records if record.name.startswith("PIL")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["classify", "absent.jpg"], "absent.jpg: no such file"),
        (["classify", "README.md", "--top-k", "0"], "--top-k 0"),
        (["classify", "README.md", "--top-k", "99"], "--top-k 99: expected 1 to 10"),
        (["classify", "examples/dog.jpg", "--url", "unix:/run/x"], "HTTPTransport(uds=PATH)"),
        (["attention", "absent.jpg", "-o", "x.png"], "absent.jpg: no such file"),
        (["attention", "README.md"], "say where to write: -o OUT, --sheet FILE.png or both"),
        (["attention", "README.md", "--sheet", "."], ".: is a folder: name a file in it"),
        (
            ["attention", "README.md", "examples", "-o", "README.md"],
            "README.md: is a file: name a folder for the maps",
        ),
        (
            ["attention", "README.md", "examples", "-o", "nowhere/maps"],
            "nowhere/maps: cannot be written: No such file",
        ),
        (["attention", "README.md", "-o", "x.jpg"], "x.jpg: expected a name that ends in .png"),
        (
            ["attention", "README.md", "LICENSE", "-o", "x.jpg"],
            "name a folder for the maps, or write one picture of all of them with --sheet x.png",
        ),
        (["attention", "examples", "-o", "x.png"], "x.png: ends like the name of a picture"),
        (
            ["attention", "README.md", "-o", "x.png", "--sheet", "./x.png"],
            "x.png: -o and --sheet name one file: name two",
        ),
        (["attention", "README.md", "--sheet", "x"], "x: expected a name that ends in .png"),
        (
            ["attention", "README.md", "-o", "nowhere/x.png"],
            "nowhere/x.png: the folder nowhere does not exist: make it first",
        ),
        (["embed", "README.md", "-o", "x.txt"], "x.txt: expected a name that ends in .npy"),
        (
            ["embed", "README.md", "-o", "nowhere/x.npy"],
            "nowhere/x.npy: the folder nowhere does not exist",
        ),
        (["classify", "absent/*.jpg"], "no such file or folder: no file matches this pattern"),
        (["classify", "https://example.org/dog.jpg"], "download the picture first"),
        (["classify", "-"], "standard input is not read"),
        (["classify", "@README.md"], "leave out the @, which is only for curl"),
        (["classify", "a" * 300], f"{'a' * 300}: File name too long"),
        (["embed", "examples/dog.jpg", "-o", f"{'a' * 300}.npy"], "File name too long"),
        pytest.param(
            ["evaluate", "--data", "README.md"],
            "README.md: not a folder: give a folder with one subfolder of pictures per class",
            marks=needs("evaluation"),
        ),
        pytest.param(
            ["teach", "dogs", "README.md"],
            "README.md: not a folder: give a folder",
            marks=needs("teach"),
        ),
        (
            ["classify", "examples/dog.jpg", "--url", "ftp://there"],
            "expected an address such as http://there",
        ),
        pytest.param(["inspect", "absent"], "absent: no such folder", marks=needs("evaluation")),
        (["classify", "README.md", "--device", "tpu"], "--device='tpu'"),
        (["classify", "examples/dog.jpg", "--url", "http://127.0.0.1:1"], "is the server running"),
        (["classify", "examples/dog.jpg", "--url", "http://127.0.0.1:abc"], "Invalid port: 'abc'"),
        (
            ["embed", "examples/dog.jpg", "-o", "x.npy", "--url", "there:80"],
            "expected an address such as http://there",
        ),
    ],
)
def test_errors_of_commands_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 1
    assert message in err
    assert err.startswith("vitserve: ")
    assert len(err.splitlines()) == 1
    assert out == ""


def test_example_is_package_data() -> None:
    example = REPOSITORY / "service/cli/example.jpg"
    assert example.read_bytes() == (REPOSITORY / "examples" / "dog.jpg").read_bytes()
    package_data = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    assert any(fnmatch("cli/example.jpg", pattern) for pattern in package_data["service"])


HEAVY = {
    "starlette",
    "uvicorn",
    "httpx",
    "pydantic",
    "numpy",
    "PIL",
    "torch",
    "prometheus_client",
}

LIST_MODULES = """
import sys
from service.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*sys.modules, file=sys.stderr)
"""


def imported_by(*arguments: str) -> set[str]:
    """Return the modules that a new interpreter has imported after this command line."""
    command = [sys.executable, "-c", LIST_MODULES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert done.stdout
    return set(done.stderr.split())


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_imports_no_subcommand(flag: str) -> None:
    modules = imported_by(flag)
    assert not modules & HEAVY
    assert {name for name in modules if name.startswith("service.cli.")} == {"service.cli.main"}


@pytest.mark.parametrize(
    "name", ["serve", "classify", pytest.param("train", marks=needs("training"))]
)
def test_flags_are_shown_without_torch(name: str) -> None:
    modules = imported_by(name, "--help")
    assert {other for other, command in commands().items() if command.module in modules} == {name}
    assert "torch" not in modules
    assert not modules & {"starlette", "uvicorn"}  # slow to import


def test_every_subcommand_is_in_the_table() -> None:
    modules = {f"service.cli.{found.name}" for found in pkgutil.iter_modules(service.cli.__path__)}
    runnable = {name for name in modules if hasattr(importlib.import_module(name), "run")}
    assert runnable <= {command.module for command in commands().values()}


def test_unlike_option_suggests_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--reload"])
    assert "--reload is not one of its options (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "near"),
    [
        (["--prot", "9000"], "--port"),
        (["serve", "--queu-size=3"], "--queue-size"),
        (["classify", "--tok", "3"], "--top-k"),
        (
            ["serve", "--model", "cats"],
            "--checkpoint or --model-name or --models or --models-bytes",
        ),
        (["serve", "--gpu"], "--device"),
        pytest.param(
            ["train", "--data", "d", "--out", "o", "--checkpoint", "bundled"],
            "--from",
            marks=needs("training"),
        ),
        pytest.param(
            ["train", "--data", "d", "--out", "o", "--lr", "1e-4"], "--set", marks=needs("training")
        ),
        (["serve", "--work", "2"], "--workers"),
    ],
)
def test_unknown_option_names_the_nearest(
    line: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(line)
    assert stopped.value.code == 2
    [message] = capsys.readouterr().err.splitlines()
    assert f": did you mean {near}?" in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["predict", "a.jpg"], "unknown command 'predict': did you mean `vitserve classify`?"),
        (["clasify", "a.jpg"], "unknown command 'clasify': did you mean `vitserve classify`?"),
        (["frobnicate"], "unknown command 'frobnicate'; available: serve, classify, "),
        (
            ["owner/name"],
            "'owner/name' is not a command: `vitserve serve owner/name` serves a checkpoint",
        ),
        (["README.md"], "`vitserve classify README.md` classifies pictures"),
        (["attention", "a.jpg", "--url", "http://there"], "but an option of classify, embed"),
        (["serve", "--port", "1", "--port=2"], "--port is given twice with different values"),
        (["embed", "a.jpg", "-o", "a.npy", "-o", "b.npy"], "-o is given twice"),
        (["serve", "--api-keys", "-key"], "a value that begins with - needs =: --flag=-value"),
        (["classify", ""], "an argument is empty: is a variable in quotes unset?"),
        (["serve", "--api-keys="], "an argument is empty: is a variable in quotes unset?"),
        (
            ["serve", "--checkpoint", "mine", "bundled"],
            "--checkpoint is given twice with different values: give one",
        ),
    ],
)
def test_a_wrong_call_says_what_was_meant(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(line)
    assert stopped.value.code == 2
    [shown] = capsys.readouterr().err.splitlines()
    assert message in shown


def test_help_or_version_may_be_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in ((["help", "embed"], "usage: vitserve embed"), (["version"], "vitserve ")):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0
        assert capsys.readouterr().out.startswith(text)


def test_flags_alone_are_those_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "http"]) == 1
    assert capsys.readouterr().err.startswith("vitserve: --port='http': ")


@pytest.mark.parametrize(
    "labels",
    ["bird,dog,thing", '["bird", "dog", "thing"]', '{"2": "thing", "0": "bird", "1": "dog"}'],
)
@pytest.mark.parametrize(
    "command",
    [
        "classify PICTURES --json --top-k 3",
        pytest.param("evaluate --data PICTURES", marks=needs("evaluation")),
        "attention PICTURES -o OUT --class thing",
        "embed PICTURES -o OUT.npy",
        pytest.param("inspect", marks=needs("evaluation")),
        pytest.param("convert -o OUT", marks=needs("formats")),
        pytest.param(
            "calibrate --data PICTURES --out OUT --coverage 0.8", marks=needs("evaluation")
        ),
    ],
)
def test_labels_are_listed_in_every_command(
    command: str, labels: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{label}/{number}.png" for label in ("bird", "dog", "thing") for number in range(8)]
    paths = {"PICTURES": write_pictures(tmp_path / "photos", *names), "OUT": tmp_path / "out"}
    line = [
        str(paths.get(word, word.replace("OUT", str(paths["OUT"])))) for word in command.split()
    ]
    code, out, err = run(capsys, *line, "--checkpoint", checkpoint, "--labels", labels)
    assert code == 0, err
    if command.startswith(("classify", "evaluate", "attention")):
        assert "thing" in out
        assert "cat" not in out
    if command.startswith(("convert", "calibrate")):
        assert load_checkpoint(str(paths["OUT"])).labels == ("bird", "dog", "thing")


def test_a_served_checkpoint_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "serve", "bundled", "--port", "http")
    assert err.startswith("vitserve: --port='http'")
