"""Pictures that the client shrinks, and their originals: `python -m benchmarks.shrink FOLDER...`

For the pictures in each folder that the client shrinks, the record has: bytes, the client's time,
the share with the same best class as the original, and the largest difference of a score, over
HTTP. It also has the requests per second for both kinds, in turn (A B B A ...); the ratio is the
median of the rounds' ratios. In results/shrink.json, `photos` are the 45 JPEGs of 8 to 25 Mpx in
drewnoakes/metadata-extractor-images@4beba640 that decode, and three of other repositories;
`imagenet-sample-images` is that repository of EliSchwartz @bc69043e: one picture for each of 1,000
classes. Few of them are large enough, so they are measured at a smaller input as well
(`--image-size`), for which the model is unsure.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.load import Loader
from benchmarks.record import Record, command_line, table
from benchmarks.servers import OURS, VITSERVE, running
from vitserve.client import Client
from vitserve.shrinking import shrink

_CONNECTIONS = 8


def main() -> None:
    """Measure each folder, record it and print the table."""
    parser = command_line("shrink", __doc__, rounds=6, seconds=5)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--image-size", default="", metavar="N", help="of the model's input")
    arguments = parser.parse_args()
    about = {"checkpoint": arguments.checkpoint.name, "connections": _CONNECTIONS}
    record = Record(arguments.record, dtype="auto", about=about)
    settings = {"VIT_IMAGE_SIZE": arguments.image_size}
    for folder in arguments.folders:
        files = sorted(
            file for file in folder.iterdir() if file.suffix.lower() in (".jpg", ".jpeg", ".png")
        )
        with running(
            VITSERVE, arguments.checkpoint.resolve(), settings, picture=files[0].read_bytes()
        ) as server:
            name = f"{folder.name}, {arguments.image_size or 'own'} size"
            record.section("folders")[name] = _measure(
                server.url, files, arguments.rounds, arguments.seconds
            )
        record.save()
    header = [
        "",
        "pictures",
        "shrunk",
        "MB",
        "smaller",
        "same class",
        "score: median",
        "worst",
        "client ms",
        "rate",
    ]
    print(table(header, map(_row, record.data["folders"].items())))


def _measure(url: str, files: list[Path], rounds: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="vitserve-shrink-") as temporary, Client(url) as client:
        model = client.model()
        found: dict[str, Any] = {"files": len(files), "dtype": model.dtype, "pictures": []}
        pairs: list[tuple[Path, Path]] = []
        for file in files:
            data = file.read_bytes()
            began = time.process_time()
            sent = shrink(data, max(model.preprocessing["resize_size"])).data
            milliseconds = 1000 * (time.process_time() - began)
            if sent != data:
                pairs.append((file, Path(temporary, file.name)))
                pairs[-1][1].write_bytes(sent)
                first, second = (
                    client.classify(each, top_k=model.classes).predictions for each in pairs[-1]
                )
                scores = {each.index: each.score for each in second}
                found["pictures"].append(
                    {
                        "file": file.name,
                        "bytes": [len(data), len(sent)],
                        "client_ms": round(milliseconds, 1),
                        "same_class": first[0].index == second[0].index,
                        "margin": round(first[0].score - first[1].score, 4),
                        "difference": round(
                            max(abs(each.score - scores[each.index]) for each in first), 4
                        ),
                    }
                )
        loads = [Loader(paths, OURS) for paths in zip(*pairs, strict=True)]
        for number in range(rounds):
            order = loads if number % 2 == 0 else reversed(loads)
            rates = {
                load: load.run(url, connections=_CONNECTIONS, seconds=seconds).rate
                for load in order
            }
            found.setdefault("rates", []).append([round(rates[load], 2) for load in loads])
        return found


def _row(section: tuple[str, dict[str, Any]]) -> list[object]:
    name, found = section
    pictures = found["pictures"]
    before, after = (sum(each["bytes"][place] for each in pictures) for place in (0, 1))
    differences = [each["difference"] for each in pictures]
    return [
        *(
            name,
            found["files"],
            len(pictures),
            f"{before / 1e6:.1f} to {after / 1e6:.1f}",
            before / after,
        ),
        f"{sum(each['same_class'] for each in pictures)} of {len(pictures)}",
        *(f"{statistics.median(differences):.4f}", f"{max(differences):.4f}"),
        statistics.median(each["client_ms"] for each in pictures),
        statistics.median(after / before for before, after in found["rates"]),
    ]


if __name__ == "__main__":
    main()
