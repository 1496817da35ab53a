"""The code that a kept graph depends on."""

from pathlib import Path

import pytest

from model.extension import Extension
from model.runtime.openvino import fingerprint


@pytest.mark.parametrize("name", ["outer_reader.py", "outer_reader/__init__.py"])
def test_code_of_extensions_is_part_of_a_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = tmp_path / name
    reader.parent.mkdir(exist_ok=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for labels in ((), ("outer_reader:read",)):
        extension = Extension(name="outer", label_readers=labels)
        monkeypatch.setattr(fingerprint, "extensions", lambda added=extension: (added,))
        for code in ("a = 1", "a = 2"):
            reader.write_text(code)
            digests.append(fingerprint.code_digest.__wrapped__())
    assert digests[0] == digests[1], "nobody reads files by this module"
    assert len(set(digests)) == 3
