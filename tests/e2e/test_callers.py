"""The project's clients against a running service: the Python client and subcommands with a URL."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from service.cli.main import main
from tests.e2e.serving import CHECKPOINT_NAME, LABELS, Pictures, Serve, Served
from vitserve.client import Classification, Client, FailedItem, ProblemError, Unauthorized

pytestmark = pytest.mark.timeout(180)  # servers start and end


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    return serve_module(api_keys="right")


def test_the_client_speaks_to_the_service(server: Served, pictures: Pictures) -> None:
    with Client(server.url, api_key="right") as client:
        assert client.model().name == CHECKPOINT_NAME
        assert client.labels() == list(LABELS)
        found = client.classify(pictures.files[0], top_k=3, attention=True)
        pictures.check(0, found.model_dump())
        assert len(found.predictions) == 3
        assert found.attention is not None
        first, second = client.classify_batch([pictures.files[1], b"no picture"]).results
        assert isinstance(first, Classification)
        pictures.check(1, first.model_dump())
        assert isinstance(second, FailedItem)
        assert second.error.status == 415
        assert client.heat_map(pictures.files[0], overlay=False).startswith(b"\x89PNG")
        [sent] = client.attention(pictures.files[0], method="cls", layer=-2, head="max")
        [kept] = client.attention(found, method="cls", layer=-2, head="max")
        assert kept.values == sent.values
        array = client.attention_array(found, method="cls", layer=-2, head="max")
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, sent.values, atol=1e-6)
        both = client.attention(found, method="gae", class_=[1, LABELS[2]])
        assert [(map_.method, map_.class_, map_.label) for map_ in both] == [
            ("gae", i, LABELS[i]) for i in (1, 2)
        ]
        array = client.attention_array(pictures.files[0], method="gae", class_=[1, LABELS[2]])
        np.testing.assert_allclose(array, [map_.values for map_ in both], atol=1e-5)
        relevant = client.classify(pictures.files[0], attention="relevance").attention
        assert relevant is not None
        assert (relevant.method, relevant.class_) == ("relevance", found.predictions[0].index)
        with pytest.raises(ProblemError, match="422 invalid_parameter"):
            client.classify(pictures.files[0], top_k=11)
    with (
        Client(server.url, api_key="wrong") as client,
        pytest.raises(Unauthorized, match="401 unauthorized"),
    ):
        client.labels()


def test_embed_asks_a_server(server: Served, pictures: Pictures, tmp_path: Path) -> None:
    for index in range(2):
        (tmp_path / f"{index}.png").write_bytes(pictures.files[index])
    asked = [
        "embed",
        str(tmp_path),
        "-o",
        str(tmp_path / "features.npy"),
        "--url",
        server.url,
        "--api-key",
        "right",
    ]
    assert main([*asked, "--pool", "mean", "--normalize"]) == 0
    with Client(server.url, api_key="right") as client:
        expected = client.embed_batch(pictures.files[:2], pool="mean", normalize=True)
    np.testing.assert_allclose(np.load(tmp_path / "features.npy"), expected, atol=1e-5)


def test_classify_asks_a_server(
    server: Served, pictures: Pictures, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(2):
        (tmp_path / f"{index}.png").write_bytes(pictures.files[index])
    (tmp_path / "2.png").write_bytes(b"no picture")
    asked = ["classify", str(tmp_path), "--url", server.url, "--api-key"]
    assert main([*asked, "right", "--json", "--top-k", str(len(LABELS))]) == 1
    captured = capsys.readouterr()
    *good, bad = [json.loads(line) for line in captured.out.splitlines()]
    for index, answer in enumerate(good):
        pictures.check(index, answer)
        assert len(answer["predictions"]) == len(LABELS)
    assert bad["error"].startswith("415 unsupported_media_type")
    assert "1 of 3 files have no answer" in captured.err
    assert main([*asked, "wrong", "--csv"]) == 1
    captured = capsys.readouterr()
    assert list(csv.DictReader(io.StringIO(captured.out))) == []
    assert "401 unauthorized" in captured.err
